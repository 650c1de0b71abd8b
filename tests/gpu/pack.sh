#!/usr/bin/env bash
# Packs a built checkout for a machine with a GPU that has PyTorch, but neither a compiler nor a network:
#   tests/gpu/pack.sh FOLDER [3.12]   after `make setup`; FOLDER must be new; some 15 MB; 3.12: the other machine's Python
# There, `. FOLDER/here` sets PYTHONPATH, and `cd FOLDER` is a checkout as the tests of tests/gpu and tests/python see it.
set -euo pipefail
cd "$(dirname "$0")/../.."

folder=${1:?the folder to pack into}
[[ ! -e $folder ]] || { echo "$0: $folder exists; name a new folder" >&2; exit 2; }
mkdir -p "$folder/deps"

git ls-files -z -- python include kernels src bench pyproject.toml tests/{conftest.py,gpu,gpu-record.json,python,reference} |
  tar --create --null --files-from=- | tar --extract --directory "$folder"
for module in _core _eager; do
  strip -s -o "$folder/python/strobe/$module.abi3.so" "build/python/python/$module.abi3.so"
done
# Packages that strobe imports, which the other machine may lack.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder/deps" \
  --python-version "${2:-3.12}" --implementation cp --platform manylinux_2_17_x86_64 --only-binary=:all: cffi click rich
cat > "$folder/here" <<'HERE'
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH=$root/python:$root/deps TORCH_DEVICE_BACKEND_AUTOLOAD=0
HERE
du -sh "$folder"
