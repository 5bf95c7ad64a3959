"""What every HTTP process shares: the ASGI application, connections, fair shares, origins."""
