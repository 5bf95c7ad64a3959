"""Code shared by every HTTP process: the ASGI application, connections, fair shares, origins."""
