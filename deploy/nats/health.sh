#!/bin/sh
# The health check of the queue server's container, run inside it.
#
# After one failed write, for example on a full disk, a stream accepts no messages until its server
# restarts: nats-server keeps the error. So a server that reports a write error is stopped once its disk has
# space, and Docker restarts it (`restart: unless-stopped`). Stored messages are kept.
port=${MONITOR_PORT:-8222}
store=${STORE_DIR:-/var/lib/nats}
server=${SERVER_PID:-1}
room_kib=16384

answer=$(printf 'GET /healthz HTTP/1.0\r\n\r\n' | nc -w 2 127.0.0.1 "$port") || exit 1
case $answer in
    *'"status":"ok"'*) exit 0 ;;
    *'write error'*)
        free_kib=$(df -Pk "$store" | awk 'NR == 2 { print $4 }')
        if [ "$free_kib" -ge "$room_kib" ]; then
            echo "a stream cannot be written; $free_kib KiB are free: restarting"
            kill -TERM "$server"
        fi
        ;;
esac
exit 1
