//! The kernel that plays an adapter, on the toy: queues in memory, posted to by threads of a C++ program that knows elements and completions by the
//! layout of their bytes (`device/hca.cpp`).

use std::fs;
use std::process::Command;

use ep_conformance::harness::share;
use ep_cuda::build::{self, Source, Target, headers};
use tempfile::TempDir;

use crate::compiler::compiler;
use crate::processor;

/// What stands in the kernel's text, and what is put in its place.
type Mutation = (&'static str, &'static str);

/// The program, of the kernel's text with one change or none. None without a compiler.
fn program(mutation: Option<Mutation>) -> Option<TempDir> {
    let compiler = compiler()?;
    let folder = tempfile::tempdir().expect("a temporary folder");
    // The word by which a warp tells the others of a bell is one that is watched.
    let (word, watched) = ("    volatile ep_u32 rings; ", "    bell::Ring rings; ");
    assert_eq!(Source::Hca.text().matches(word).count(), 1, "the kernel has it once: {word}");
    let own = [
        ("hca.cu", Source::Hca.text().replace(word, watched)),
        ("hca.cpp", include_str!("device/hca.cpp").to_owned()),
        ("bell.h", include_str!("device/bell.h").to_owned()),
    ];
    let mut found = 0;
    for (name, mut text) in headers().into_iter().chain(own).filter(|(name, _)| !processor::has(name)) {
        if let Some((from, to)) =
            mutation.filter(|_| ["hca.cu", "ep_hca_copy.h", "ep_hca_element.h", "ep_hca_piece.h"].contains(&name))
        {
            found += text.matches(from).count();
            text = text.replace(from, to);
        }
        fs::write(folder.path().join(name), text).expect("the file can be written");
    }
    if let Some((from, _)) = mutation {
        assert_eq!(found, 1, "the kernel has it once: {from}");
    }
    let mut command = processor::compiler_in(folder.path(), &compiler);
    let said = command.args(["-Werror=return-type", "-o", "hca", "hca.cpp"]).output().expect("the compiler runs");
    assert!(said.status.success(), "{mutation:?}: {}", String::from_utf8_lossy(&said.stderr));
    Some(folder)
}

/// What a run says is wrong.
fn run(program: &TempDir, seed: u64) -> Result<(), String> {
    let ran = Command::new(program.path().join("hca")).arg(seed.to_string()).output().expect("the program runs");
    if ran.status.success() { Ok(()) } else { Err(format!("seed {seed}: {}", String::from_utf8_lossy(&ran.stderr))) }
}

#[test]
fn an_adapter_that_a_gpu_plays_keeps_order_bounds_and_time() {
    let Some(program) = program(None) else { return };
    for seed in 1..=3 {
        run(&program, seed).unwrap_or_else(|wrong| panic!("{wrong}"));
    }
}

#[test]
fn what_breaks_an_adapter_that_a_gpu_plays_is_found() {
    let mutations: [(Mutation, &str); 28] = [
        (("most = waiting != 0 ?", "most = false ?"), "cell 7"),
        // What comes first, by how the threads run.
        ((" || e.is_inline != 0; }", "; }"), "not what was written before the signal|does not come"),
        (("!(ep_now() >= mine.due)", "false"), "8008 bytes"),
        (("bytes * a.pace / 1000000;", "bytes * 0;"), "8008 bytes"),
        (("(number >> q.log_completions & 1)", "(0)"), "does not come"),
        (("(ep_u32)(index & 0xffff) << 16", "(ep_u32)(number & 0xffff) << 16"), "is of"),
        (("(e.flags & EP_HCA_COMPLETE) != 0)", "true)"), "is of"),
        (("offset <= one.bytes - bytes)", "offset <= one.bytes)"), "opcode 0 of its completion"),
        (("one.local_key) != key ||", "one.local_key) == 0 ||"), "opcode 0 of its completion"),
        (("(one.access & access) != access", "false"), "opcode 0 of its completion"),
        (("e.to % 8 != 0)", "false)"), "opcode 0 of its completion"),
        (("if ((q.rights & access) == 0)", "if (false)"), "opcode 0 of its completion"),
        (("if (ep_hca_queue(a, queue)->syndrome != 0)", "if (false)"), "completion 3 is of"),
        (("e.opcode, 0, EP_HCA_FLUSHED)", "e.opcode, 0, q->syndrome)"), "not 5"),
        (("q->produced += ahead;", "q->produced = index;"), "does not come"),
        (
            ("e.add = ep_hca_wide(segment[2].x, segment[2].y)", "e.add = ep_hca_big(segment[2].x)"),
            "the cell is 0, and was 0",
        ),
        // A bell orders nothing: at the warp that listens, at those that serve.
        (
            ("                ep_fence_block();\n                block.rings", "                block.rings"),
            "orders nothing",
        ),
        (
            ("            ep_fence_block();\n            ep_warp_meet();\n", "            ep_warp_meet();\n"),
            "has not fenced",
        ),
        // A batch counts as copied before all its pieces are.
        (("->done) == mine.pieces", "->done) > 0"), "not what was written before the signal"),
        // A piece counts before it has arrived.
        (
            (
                "    ep_fence_sys();\n    ep_warp_meet();\n    if (ep_warp_lane() != 0) return;\n    ep_fence_device();",
                "    ep_warp_meet();\n    if (ep_warp_lane() != 0) return;",
            ),
            "not what was written before the signal",
        ),
        // Stretches are taken for those of the job's last batch, of which nothing is held.
        (
            ("job == hands.last && hands.held.bytes != 0;", "job == hands.last;"),
            "from lane 32|not what was written before the signal",
        ),
        // It is stored before it has been fetched.
        (
            ("ep_fetch_wait<1>()", "ep_fetch_wait<2>()"),
            "rows are not what was written|not what was written before the signal",
        ),
        // What was stored of a batch counts for the next one.
        (("ep_hca_count<1>(a, hands.before", "ep_hca_count<1>(a, hands.last"), "does not come"),
        // A ticket is good for one piece, and the other is nobody's.
        (("hands.kept = number + 1 < all ? number + 1 : 0;", "hands.kept = 0;"), "does not come"),
        // Batches of a queue pair finish in any order.
        (("mine.is_oldest == 0 || ", ""), "traffic: "),
        // Queue pairs are not looked at after a batch has finished, after one has begun.
        (("rung || finished != 0 || s.is_stale;", "rung || s.is_stale;"), "the contract is broken: is_needed"),
        (("s.is_stale = finds;", "s.is_stale = false;"), "the contract is broken: is_needed"),
        // A stretch's pieces begin with those before it.
        (("(number - (of == 0 ? 0 : before))", "number"), "rows are not what was written"),
    ];
    // Each is compiled: a fifth of them, where nobody asks for more.
    for (mutation, expected) in mutations.into_iter().step_by(share(1, 5)) {
        let Some(program) = program(Some(mutation)) else { return };
        let found = (1..=20).find_map(|seed| run(&program, seed).err());
        let said = found.unwrap_or_else(|| panic!("nothing is found: {mutation:?}"));
        assert!(expected.split('|').any(|expected| said.contains(expected)), "{mutation:?}: {said}");
    }
}

/// By the compiler that GPUs' hosts have: it uses no local memory, and a multiprocessor has room for its 512 threads.
#[test]
#[ignore = "needs NVRTC"]
fn the_kernel_compiles_for_gpus() {
    for arch in ["sm_80", "sm_90a", "sm_100a"] {
        let code = build::compile(&Target::new(Source::Hca, arch)).unwrap_or_else(|error| panic!("{error}"));
        let needs = build::resources(&code).expect("a cubin")[Source::Hca.kernel()];
        assert!(needs.local_memory == 0 && needs.registers <= 128, "{arch}: {needs:?}");
    }
}
