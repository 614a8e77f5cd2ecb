import io
import json
import subprocess
import sys

import pandas as pd
import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import torch
from bass_lab.measure import launch_counts

tables = {}
for temperature in (0.0, 1.0):
    table = launch_counts.launches(*launch_counts.named("paper-7.8b", layers=2), temperature=temperature)
    tables[f"temperature {temperature:.0f}"] = table
tables["as they are"] = launch_counts.launches(*launch_counts.named("paper-7.8b", layers=2), compiled=False)
counted = launch_counts._Counted()
with launch_counts._absent_gpu(counted), counted.fake:
    x = torch.empty(8, 64, device="cuda")
    with counted, counted.at("plain", ""):
        y = (x.view(64, 8).T + 1).to(torch.float32).contiguous()  # a sum and a copy; views and no conversion
        y.add_(1)
        torch.empty_like(y)
    region = torch.compile(lambda x: (x @ x.T).softmax(-1).exp() @ x, backend=counted.compile, fullgraph=True)
    with counted.at("region", ""):
        region(x)
        region(x)
named = zip(("phase", "place", "what", "launches"), zip(*[(*key, count) for key, count in counted.launches.items()]))
tables["by hand"] = __import__("pandas").DataFrame(dict(named))
print(__import__("json").dumps({name: table.to_json() for name, table in tables.items()}))
"""


@pytest.fixture(scope="module")
def tables():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = json.loads(done.stdout.splitlines()[-1])
    return {name: pd.read_json(io.StringIO(table)) for name, table in lines.items()}


def test_operators_and_regions_are_counted(tables):
    table = tables["by hand"].set_index(["phase", "what"]).launches
    assert table["plain"].to_dict() == {"add": 1, "clone": 1, "add_": 1}
    assert table["region"].to_dict() == {"product": 2 * 2, "fused": 2 * 1}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("phase", ["draft", "verify"])
def test_layer_launches_products_attention_and_fused_kernels(tables, phase, temperature):
    table = tables[f"temperature {temperature}"].query("phase == @phase and place == 'layers'")
    each = table.set_index("what").each.to_dict()
    assert each == {"product": 4, "fused": 5, "_write_token": 1, "_attend_pieces": 1}


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_draft_pass_launches_few_kernels_around_its_layers(tables, temperature):
    table = tables[f"temperature {temperature}"].query("phase == 'draft'").groupby("place").launches.sum()
    # Embedding, token indices, rotary factors, norm, logits; torch 2.11 fuses in two more kernels. One plan.
    assert table.around <= 5 * 7 + 2
    assert table.glue <= 5 + 14


def test_compiling_spares_launches(tables):
    compiled, plain = (
        tables[name].query("place == 'layers'").launches.sum() for name in ("temperature 0", "as they are")
    )
    assert compiled < plain / 2
