#!/bin/sh
# Print a script that turns a new machine into a worker, for a cloud's user data (start-up script, custom data) or for ssh.
#
#   export SPILLWAY_NATS__URLS='["tls://spillway:PASSWORD@queue.example.com:4222"]'
#   deploy/vm/make-user-data.sh POOL spillway.toml registry.example.com/spillway-vllm:0.2.0 >user-data.sh
#   ssh ubuntu@HOST sudo sh -s <user-data.sh
#
# The machine needs Docker, NVIDIA's driver and container toolkit, and outbound connections; it needs no inbound ones. The image is from
# deploy/images/vllm.Dockerfile. MODEL on the Hugging Face hub becomes the folder MODEL_FOLDER, which the pool's engine names.
#
# The output contains the queue's password: everyone who can read the machine's user data can read it.
set -eu
pool="${1:?usage: make-user-data.sh POOL CONFIGURATION IMAGE}"
configuration="${2:?usage: make-user-data.sh POOL CONFIGURATION IMAGE}"
image="${3:?usage: make-user-data.sh POOL CONFIGURATION IMAGE}"
model="${MODEL:-Qwen/Qwen2.5-7B-Instruct}"
folder="${MODEL_FOLDER:-/models/qwen-7b}"
: "${SPILLWAY_NATS__URLS:?a list of addresses, such as [\"tls://spillway:PASSWORD@queue.example.com:4222\"]}"

case "$pool$image$model$folder" in
  *[!A-Za-z0-9._:/@-]*) echo "pool, image, model and folder: letters, digits and . _ : / @ - only" >&2 && exit 2 ;;
esac

cat <<SCRIPT
#!/bin/sh
set -eu
install -d -m 0755 /etc/spillway $folder
chown 10001:10001 $folder
umask 077
base64 -d >/etc/spillway/environment <<'END'
$(printf 'SPILLWAY_NATS__URLS=%s\n' "$SPILLWAY_NATS__URLS" | base64)
END
base64 -d >/etc/spillway/spillway.toml <<'END'
$(base64 <"$configuration")
END
chmod 0644 /etc/spillway/spillway.toml
docker run --rm --network host --volume $folder:$folder --entrypoint hf $image \\
  download $model --local-dir $folder
docker rm --force spillway 2>/dev/null || true
# The host's network, to reach the metadata service, which announces the machine's end.
docker run --detach --name spillway --restart unless-stopped --init --stop-timeout 45 \\
  --gpus all --network host --ipc host --cap-drop ALL --security-opt no-new-privileges \\
  --volume $folder:$folder:ro --volume /etc/spillway/spillway.toml:/etc/spillway/spillway.toml:ro \\
  --env-file /etc/spillway/environment \\
  $image worker --config /etc/spillway/spillway.toml --pool $pool --ready-file /tmp/ready
SCRIPT
