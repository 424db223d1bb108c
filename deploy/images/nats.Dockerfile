# nats-server with Spillway's configuration, run as an unprivileged user whose data folder a named volume can inherit. The
# official image runs as root and has no such folder. This image changes only with the lines below, so rebuilding Spillway's
# other images never restarts the queue.
FROM nats:2.15-alpine
RUN mkdir -p /var/lib/nats && chown 10001:10001 /var/lib/nats && chmod 0700 /var/lib/nats
# Set the modes: under umask 077 only the checkout's owner can read it.
COPY --chmod=0644 deploy/nats/nats-server.conf /etc/nats/nats-server.conf
COPY --chmod=0755 deploy/nats/health.sh /usr/local/bin/nats-health
USER 10001:10001
# Entrypoint and command of the base image: nats-server --config /etc/nats/nats-server.conf
