import subprocess
import sys

import torch

from pipeline.compiled import compiled


def test_a_function_is_compiled_once_at_its_first_call():
    compilations = []

    def backend(graph, inputs):
        compilations.append(len(inputs))
        return graph.forward

    double = compiled(lambda x: x * 2, backend=backend)
    assert not compilations
    assert [double(torch.tensor([1.0, n])).tolist() for n in (2.0, 3.0)] == [[2, 4], [2, 6]]
    assert compilations == [1]


def test_the_compiler_is_not_loaded_at_the_start():
    imports = "import sys, pipeline.drafter, pipeline.loss, pipeline.evaluation"
    start = f"{imports}; print('torch._inductor.compile_fx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", start], capture_output=True, text=True).stdout == "False\n"
