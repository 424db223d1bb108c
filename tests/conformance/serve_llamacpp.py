"""llama.cpp's own server, from the package xllamacpp: serve_llamacpp.py FILE PORT CONTEXT SLOTS."""

import signal
import sys

from xllamacpp import CommonParams, Server

file, port, context, slots = sys.argv[1:]
params = CommonParams()
params.model.path = file
params.hostnames, params.port = ["127.0.0.1"], int(port)
params.n_ctx, params.n_parallel = int(context), int(slots)
params.cpuparams.n_threads = 1
server = Server(params)
signal.sigwait({signal.SIGTERM, signal.SIGINT})
