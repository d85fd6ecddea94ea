#!/bin/sh
# Compiles the kernels that lie beside it with CANN's compiler into kernels.o, which EP_ASCEND_KERNELS names: `./build.sh`
# ASCEND_HOME_PATH is the folder of CANN's toolkit, as its set_env.sh sets it.
set -eu
cd "$(dirname "$0")"
: "${ASCEND_HOME_PATH:?is not set: source set_env.sh of CANN}"

# tool NAME: where the toolkit has it.
tool() {
    for folder in "$ASCEND_HOME_PATH/bin" "$ASCEND_HOME_PATH"/*-linux/bin "$ASCEND_HOME_PATH"/*-linux/ccec_compiler/bin \
        "$ASCEND_HOME_PATH/compiler/ccec_compiler/bin"; do
        [ ! -x "$folder/$1" ] || { echo "$folder/$1"; return; }
    done
    echo "no $1 in $ASCEND_HOME_PATH" >&2
    return 1
}
compiler=$(tool bisheng)
linker=$(tool ld.lld)

# Folders of kernel_operator.h and of what it includes, which lie elsewhere in every release.
set --
for root in "$ASCEND_HOME_PATH" "$ASCEND_HOME_PATH"/*-linux "$ASCEND_HOME_PATH/compiler"; do
    for folder in include tikcpp/tikcfw tikcpp/tikcfw/impl tikcpp/tikcfw/interface asc/include asc/include/basic_api asc/include/adv_api \
        asc/include/utils asc/impl/basic_api asc/impl/adv_api asc/impl/utils; do
        [ ! -d "$root/$folder" ] || set -- "$@" "-I$root/$folder"
    done
done
[ $# -gt 0 ] || { echo "no headers of AscendC in $ASCEND_HOME_PATH" >&2; exit 1; }

# For vector cores of 910B. No --cce-auto-sync: flags between pipes are the kernels' own. No cleaning of lines is put in: the kernels clean theirs.
# Sums round after every operation, as on other machines.
objects=
for source in *.cpp; do
    "$compiler" -c -x cce -O2 -std=c++17 -ffp-contract=off --cce-aicore-only --cce-aicore-arch=dav-c220-vec \
        -mllvm -cce-aicore-stack-size=0x8000 -mllvm -cce-aicore-function-stack-size=0x8000 \
        -mllvm -cce-aicore-addr-transform -mllvm -cce-aicore-dcci-insert-for-scalar=false \
        -I. "$@" "$source" -o "${source%.cpp}.o"
    objects="$objects ${source%.cpp}.o"
done
# shellcheck disable=SC2086 # names without spaces
"$linker" -m aicorelinux -Ttext=0 -static $objects -o kernels.o
echo "$PWD/kernels.o"
