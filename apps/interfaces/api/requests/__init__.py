"""Code shared by all API views: authentication, parsing, names, permissions and pages."""
