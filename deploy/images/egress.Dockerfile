# The proxy that GPU boxes reach the internet through (deploy/egress/squid.conf).
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends squid && rm -rf /var/lib/apt/lists/*
COPY deploy/egress/squid.conf /etc/squid/squid.conf
USER proxy
CMD ["squid", "-N", "-f", "/etc/squid/squid.conf"]
