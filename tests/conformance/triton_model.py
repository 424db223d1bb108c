"""A model of Triton's Python backend around Spillway's engine: `model.py` in its repository, run by Triton's Python.

The engine runs in Spillway's environment (``triton_engine``), behind a Unix socket, because their packages are
incompatible. Every parameter is an input, as with the TensorRT-LLM backend; like that, it reports no finish reason.
"""

import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as backend


class TritonPythonModel:
    """Decoupled: answers each request from a separate thread, with one response per engine output."""

    def initialize(self, args):
        self._folder = tempfile.TemporaryDirectory()
        self._address = Path(self._folder.name, "engine")
        self._engine = subprocess.Popen([*json.loads(os.environ["ENGINE_COMMAND"]), str(self._address)])
        while not self._address.exists() and self._engine.poll() is None:
            time.sleep(0.1)

    def execute(self, requests):
        for request in requests:
            tensors = {tensor.name(): tensor.as_numpy().ravel()[0] for tensor in request.inputs()}
            asked = {name: one.decode() if isinstance(one, bytes) else one.item() for name, one in tensors.items()}
            threading.Thread(target=self._answer, args=(asked, request.get_response_sender()), daemon=True).start()

    def _answer(self, asked, sender):
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(self._address))
                connection.sendall(json.dumps(asked).encode() + b"\n")
                for line in connection.makefile("rb"):
                    if sender.is_cancelled():
                        break
                    sender.send(_response(json.loads(line)))
        except OSError as error:
            sender.send(_response({"error": str(error)}))
        finally:
            sender.send(flags=backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        self._engine.terminate()
        self._engine.wait()
        self._folder.cleanup()


def _response(reply):
    if "error" in reply:
        return backend.InferenceResponse(error=backend.TritonError(reply["error"]))
    text = np.array([reply["text"].encode()], dtype=object)
    return backend.InferenceResponse([backend.Tensor("text_output", text)])
