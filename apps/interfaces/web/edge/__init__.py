"""The ASGI layers in front of Django: the front door and the limits shared by web and API."""
