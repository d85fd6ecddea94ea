//! The twin's own tests: each rule of the device is shown by a tiny kernel that breaks it and is caught, and by one that keeps it and passes.

mod roce;

use std::sync::OnceLock;

use ep_ascend::twin::{Library, Machine, Reach, TwinError};

const SEEDS: u64 = 40;
const TURNS: u64 = 300_000;

/// Compiled once for all tests.
fn library() -> Library {
    static BUILT: OnceLock<Library> = OnceLock::new();
    let kernels = [("kernels.cpp", include_str!("kernels.cpp"))];
    BUILT.get_or_init(|| Library::build(&[], &kernels, &[]).unwrap_or_else(|error| panic!("{error}"))).clone()
}

/// Runs a kernel on `blocks` cores of rank 0 of four, in groups of two: what it says, 8 words.
fn run(library: &Library, kernel: &str, seed: u64, blocks: u32) -> Result<(Vec<u64>, u64), TwinError> {
    let mut machine = Machine::new(library, seed, 4, 2)?;
    let bytes = vec![0u8; 4096];
    let mut at = |rank, reach| machine.place(rank, &bytes, reach);
    let (own, window, peer_window) = (at(0, Reach::Own)?, at(0, Reach::Group)?, at(1, Reach::Group)?);
    let (peer_own, far_window) = (at(1, Reach::Own)?, at(2, Reach::Group)?);
    let (constant, out) = (at(0, Reach::ReadOnly)?, at(0, Reach::Own)?);
    let places = [own, window, peer_window, peer_own, far_window, constant, out, 4096];
    let args = machine.place(0, &places, Reach::ReadOnly)?;
    machine.launch(0, kernel, blocks, args)?;
    machine.run(TURNS)?;
    Ok((machine.read(out, 16)?, machine.history()))
}

/// In how many of the seeds a kernel breaks `rule`; it may break no other.
fn caught(library: &Library, kernel: &str, rule: &str) -> u64 {
    let faults = (0..SEEDS).filter(|&seed| match run(library, kernel, seed, 1) {
        Ok(_) => false,
        Err(TwinError::Fault(said)) if said.starts_with(rule) => true,
        Err(other) => panic!("{kernel}, seed {seed}: {other}"),
    });
    faults.count() as u64
}

/// A kernel's rule, and the least number of seeds of 40 that must catch it: order shows only where an instruction is late.
const FAULTS: [(&str, &str, u64); 35] = [
    ("load_then_scalar", "order: ", 20),
    ("load_then_vector", "order: ", 5),
    ("vector_then_load", "order: ", 5),
    ("vector_then_store", "order: ", 5),
    ("store_then_vector", "order: ", 5),
    ("load_then_store", "order: ", 5),
    ("store_then_load", "order: ", 5),
    ("scalar_then_store", "order: ", 5),
    ("scalar_then_vector", "order: ", 5),
    ("vector_then_scalar", "order: ", 20),
    ("vectors", "order: ", 5),
    ("stores", "order: ", 5),
    ("loads", "order: ", 5),
    ("barrier_of_another_pipe", "order: ", 5),
    ("flag_set_twice", "flags: ", SEEDS),
    ("flag_left", "flags: the end: a flag is left set", SEEDS),
    ("flag_of_the_framework", "flags: SetFlag: event id is 6, allowed: 0 to 5", SEEDS),
    ("flag_never_set", "hang: ", SEEDS),
    ("flag_never_set_for_a_pipe", "hang: ", SEEDS),
    ("ub_full", "UB: InitBuffer: 33 bytes where 32 are left", SEEDS),
    ("ub_buffers", "UB: InitBuffer: more than 64 buffers", SEEDS),
    ("ub_beyond_the_buffer", "UB: ", SEEDS),
    ("ub_pad_beyond_the_buffer", "UB: ", SEEDS),
    ("ub_alignment", "alignment: ", SEEDS),
    ("vector_alignment", "alignment: ", SEEDS),
    ("floor", "floor: DataCopy", SEEDS),
    ("length", "limits: ", SEEDS),
    ("rounding", "limits: ", SEEDS),
    ("bounds", "bounds: DataCopy (GM to UB): bytes 3872 to 4128 of a region of 4096 of rank 0", SEEDS),
    ("nobody", "bounds: GetValue", SEEDS),
    ("scalar_alignment", "alignment: GetValue", SEEDS),
    ("reach_of_a_group", "reach: DataCopy (UB to GM): memory of rank 2, which is of another group", SEEDS),
    ("reach_of_what_is_no_window", "reach: DataCopy (GM to UB): memory of rank 1, which is no window", SEEDS),
    ("constant", "reach: DataCopy (UB to GM): a write to memory that is only read", SEEDS),
    ("scalar_store_not_cleaned", "cache: the end", 20),
];

#[test]
fn each_rule_is_caught_where_it_is_broken_and_only_there() {
    let library = library();
    for (name, rule, least) in FAULTS {
        let (broken, kept) = (format!("{name}_broken"), format!("{name}_kept"));
        let seeds = caught(&library, &broken, rule);
        assert!(seeds >= least, "{broken} is caught in {seeds} of {SEEDS} seeds, expected {least}");
        for seed in 0..SEEDS {
            run(&library, &kept, seed, 1).unwrap_or_else(|fault| panic!("{kept}, seed {seed}: {fault}"));
        }
    }
}

#[test]
fn a_kernel_that_never_ends_is_ended() {
    let library = library();
    assert_eq!(run(&library, "spin_broken", 1, 1), Err(TwinError::Watchdog(TURNS)));
    run(&library, "spin_kept", 1, 1).expect("it ends");
}

/// Of the seeds, those in which the kernel says 1 in its first word.
fn says_so(library: &Library, kernel: &str, blocks: u32) -> u64 {
    let said =
        (0..SEEDS).map(|seed| run(library, kernel, seed, blocks).unwrap_or_else(|e| panic!("{kernel}: {e}")).0[0]);
    said.filter(|&word| word == 1).count() as u64
}

#[test]
fn what_is_announced_before_it_has_landed_is_not_there() {
    let library = library();
    assert_eq!(says_so(&library, "announced_kept", 2), SEEDS);
    let there = says_so(&library, "announced_broken", 2);
    assert!(there < SEEDS - 2, "all is there in {there} of {SEEDS} seeds");
}

#[test]
fn a_line_stays_stale_until_it_is_cleaned() {
    let library = library();
    assert_eq!(says_so(&library, "stale_line_kept", 2), SEEDS);
    let seen = says_so(&library, "stale_line_broken", 2);
    assert!(seen < SEEDS - 4, "{seen} of {SEEDS}");
}

#[test]
fn bytes_behind_a_padded_copy_are_undefined() {
    let library = library();
    assert_eq!(says_so(&library, "pad_kept", 1), SEEDS);
    assert_eq!(says_so(&library, "pad_broken", 1), 0, "no word behind the copied bytes stays");
}

#[test]
fn of_two_cores_that_store_to_one_line_one_may_lose() {
    let library = library();
    let both = |kernel: &str, apart: usize| {
        let stayed = |&seed: &u64| {
            let (words, _) = run(&library, kernel, seed, 2).unwrap_or_else(|e| panic!("{kernel}: {e}"));
            words[0] == 1 && words[apart] == 1
        };
        (0..SEEDS).filter(stayed).count() as u64
    };
    assert_eq!(both("shared_line_kept", 8), SEEDS);
    let broken = both("shared_line_broken", 1);
    assert!(broken < SEEDS - 4, "both stores stay in {broken} of {SEEDS} seeds");
}

#[test]
fn a_seed_replays_exactly() {
    let library = library();
    let history = |seed| run(&library, "announced_kept", seed, 2).expect("it passes").1;
    for seed in 0..8 {
        assert_eq!(history(seed), history(seed));
    }
    assert_ne!(history(0), history(1), "seeds differ");
}

#[test]
fn bad_input_of_the_host_is_refused() {
    let library = library();
    let said = |result: Result<u64, TwinError>| result.expect_err("refused").to_string();
    assert!(Machine::new(&library, 0, 0, 1).is_err() && Machine::new(&library, 0, 1, 0).is_err());
    let mut machine = Machine::new(&library, 0, 2, 2).expect("two ranks");
    assert_eq!(said(machine.alloc(2, 8, Reach::Own)), "rank is 2, allowed: below 2");
    assert!(said(machine.alloc(0, u64::MAX, Reach::Own)).contains("allowed: up to 2^40"));
    let at = machine.alloc(0, 8, Reach::Own).expect("memory");
    assert!(machine.write(at, &[0u64; 2]).is_err() && machine.read::<u64>(at + 1, 1).is_err());
    assert!(machine.read::<u64>(at, 1).is_ok() && machine.write(at, &[1u64]).is_ok());
    let launched = |machine: &mut Machine, blocks, kernel| machine.launch(0, kernel, blocks, at).map(|()| 0);
    assert!(said(launched(&mut machine, 0, "spin_kept")).contains("allowed: 1 to 48"));
    assert!(said(launched(&mut machine, 49, "spin_kept")).contains("allowed: 1 to 48"));
    for no_kernel in ["no_such_kernel", "twin_free", "malloc", ""] {
        assert!(said(launched(&mut machine, 1, no_kernel)).contains("allowed: a kernel of the library"), "{no_kernel}");
    }
}

/// The compiler refuses what these types of the API do not have.
#[test]
fn what_the_api_lacks_does_not_compile() {
    let bodies = [
        "LocalTensor<bfloat16_t> t; Add(t, t, t, 16);",
        "LocalTensor<float> f; LocalTensor<int8_t> t; Cast(t, f, RoundMode::CAST_RINT, 16);",
        "PipeBarrier<PIPE_S>();",
    ];
    for body in bodies {
        let text = format!("#include \"kernel_operator.h\"\nusing namespace AscendC;\nvoid k() {{ {body} }}\n");
        let refused = Library::build(&[], &[("kernels.cpp", &text)], &[]);
        assert!(matches!(refused, Err(TwinError::Compiler(_))), "it compiles: {body}");
    }
}
