"""Code that inference servers import: PyTorch only, in one file."""

from pathlib import Path

LOADER = "agentrl_weight_delta.load"
"""The name under which a server finds `load`: this folder is on the server's PYTHONPATH."""
WORKER = "agentrl_weight_delta.VLLMWeights"
"""The name under which vLLM finds the calls of its workers."""
LOADER_FOLDER = str(Path(__file__).parent)
