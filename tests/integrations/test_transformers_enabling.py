"""``enable()`` in a process that hasn't loaded transformers before."""

from __future__ import annotations

from apart import run_apart

PROGRAM = """
import tempfile, torch, transformers
from exkv.integrations.transformers import disable, enable
enable(every_name=True)
from tiny import llama, reference, save
folder = save(reference(llama()), tempfile.mkdtemp())
from transformers import AutoModelForCausalLM, processing_utils
model = AutoModelForCausalLM.from_pretrained(folder)
from transformers import SinkCache, OffloadedCache
ids = torch.arange(3, 13).view(1, -1)
out = model.generate(ids, past_key_values=SinkCache(window_length=20), max_new_tokens=4)
print(out.shape[1], SinkCache.__module__)
disable()
try:
    from transformers import OffloadedCache
except ImportError:
    print("gone")
"""


def test_removed_classes_can_be_imported_after_loading():
    done = run_apart(PROGRAM)
    assert done.returncode == 0, done.stderr
    assert "exkv.integrations.transformers.named" in done.stdout and "gone" in done.stdout
