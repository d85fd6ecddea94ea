//! Our structures beside those of rdma-core's headers.

use std::fmt::Write as _;
use std::fs;
use std::mem::offset_of;
use std::process::Command;

use super::*;

/// Assertions in C++ that a struct has these fields where ours has them.
macro_rules! fields {
    ($rust:ident is $c:literal { $($field:ident = $name:literal),* $(,)? }) => {{
        let mut out = String::new();
        $(writeln!(out, "static_assert(offsetof({}, {}) == {});", $c, $name, offset_of!($rust, $field)).unwrap();)*
        out
    }};
}

fn assertions() -> String {
    let mut out = [
        fields!(ContextAttr is "mlx5dv_context_attr" { flags = "flags", comp_mask = "comp_mask" }),
        fields!(Uar is "mlx5dv_devx_uar" { reg_addr = "reg_addr", base_addr = "base_addr", page_id = "page_id" }),
        fields!(Umem is "mlx5dv_devx_umem" { umem_id = "umem_id" }),
        fields!(UmemIn is "mlx5dv_devx_umem_in" {
            addr = "addr", size = "size", access = "access", pgsz_bitmap = "pgsz_bitmap", comp_mask = "comp_mask", dmabuf_fd = "dmabuf_fd",
        }),
        fields!(PdNumber is "mlx5dv_pd" { pdn = "pdn", comp_mask = "comp_mask" }),
        fields!(AddressVector is "mlx5_wqe_av" { rmac = "rmac" }),
        fields!(Ah is "mlx5dv_ah" { av = "av", comp_mask = "comp_mask" }),
        fields!(Obj is "mlx5dv_obj" { ah = "ah", pd = "pd" }),
        fields!(ObjPart is "decltype(mlx5dv_obj::pd)" { of = "in", out = "out" }),
    ]
    .concat();
    let sizes = [
        ("mlx5dv_context_attr", size_of::<ContextAttr>()),
        ("mlx5dv_devx_umem_in", size_of::<UmemIn>()),
        ("mlx5_wqe_av", size_of::<AddressVector>()),
        ("mlx5dv_obj", size_of::<Obj>()),
    ];
    for (name, size) in sizes {
        writeln!(out, "static_assert(sizeof({name}) == {size});").unwrap();
    }
    let numbers = [
        ("MLX5DV_CONTEXT_FLAGS_DEVX", CONTEXT_DEVX.into()),
        ("MLX5DV_UMEM_MASK_DMABUF", UMEM_DMABUF),
        ("MLX5DV_OBJ_AH", OBJ_AH),
        ("MLX5DV_OBJ_PD", OBJ_PD),
        ("MLX5DV_UAR_ALLOC_TYPE_BF", UAR_BF.into()),
        ("MLX5DV_UAR_ALLOC_TYPE_NC", UAR_NC.into()),
    ];
    for (name, value) in numbers {
        let value: u64 = value;
        writeln!(out, "static_assert({name} == {value}u);").unwrap();
    }
    out
}

#[test]
#[ignore = "needs libibverbs-dev"]
fn structures_and_numbers_are_those_of_rdma_core() {
    let folder = tempfile::tempdir().unwrap();
    let text = format!("#include <infiniband/mlx5dv.h>\n#include <cstddef>\n{}", assertions());
    fs::write(folder.path().join("sys.cpp"), text).unwrap();
    let mut compiler = Command::new(std::env::var("CXX").unwrap_or_else(|_| "g++".into()));
    compiler.args(["-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", "sys.cpp"]).current_dir(folder.path());
    let said = compiler.output().unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
}
