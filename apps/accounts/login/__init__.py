"""Sign-in: allauth's pages, second factors, sessions and verified addresses."""
