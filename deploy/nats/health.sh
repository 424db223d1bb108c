#!/bin/sh
# The health check of the queue server's container, run inside it.
#
# A stream that could not be written once, because the disk was full for a moment, takes nothing more until its server
# starts again: nats-server keeps the error. So a server that tells of a write error is ended as soon as its disk has
# room, and Docker, whose `restart: unless-stopped` that is, starts it again. What was stored is still there.
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
