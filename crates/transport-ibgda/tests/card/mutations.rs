//! What breaks a rule is found: each error, planted in the text or in how it is used, ends some scenario that goes well without it.

use ep_ibgda::{Doorbell, Settings, Signal};
use soft_hca::{Link, Mood};

use crate::common::Mutation;
use crate::rank::Verbs;
use crate::rings::{Plant, Scenario, run};

/// Seeds that are tried before an error counts as not found.
const SEEDS: u64 = 40;

/// A scenario in which as much as possible may go wrong.
fn hostile(seed: u64, settings: &Settings, plant: Plant) -> Scenario {
    Scenario {
        seed,
        ranks: 2,
        link: Link::Ethernet,
        mood: Mood::hostile(),
        settings: settings.clone(),
        rows: 40,
        slots: [16, 2, 4][seed as usize % 3],
        plant,
    }
}

/// Rows of several messages: queues are full now and then.
fn settings(relaxed: bool, doorbell: Doorbell) -> Settings {
    let settings = Settings::new().relaxed_ordering(relaxed).doorbell(doorbell).log_depth(6);
    settings.and_then(|settings| settings.longest_message(8)).expect("settings")
}

/// The first thing that goes wrong.
fn found(verbs: &Verbs, settings: &Settings, plant: Plant) -> Option<String> {
    (0..SEEDS).find_map(|seed| run(verbs, &hostile(seed, settings, plant)).err())
}

/// That the text with this change fails, and how: one of these words is in what is said first.
fn is_found(what: &str, settings: &Settings, mutation: Mutation<'_>, words: &[&str]) {
    let Some(verbs) = Verbs::new(settings, Some(mutation)) else { return };
    let said = found(&verbs, settings, Plant::Nothing).unwrap_or_else(|| panic!("not found: {what}"));
    assert!(words.is_empty() || words.iter().any(|word| said.contains(word)), "{what}: {said}");
}

const BOTH: [Doorbell; 2] = [Doorbell::Single, Doorbell::Double];
const FENCE_BEFORE_INDEX: &str =
    "    ep_fence_sys();\n#if EP_MLX5_DOUBLE_BELL\n    ep_st_register((void*)q->bell, bell);\n#endif\n";
const LAST_BELL: &str = "    ep_fence_sys();\n    ep_st_register((void*)q->bell, bell);\n    q->rung = q->posted;";

#[test]
fn without_a_mutation_nothing_is_found() {
    for doorbell in BOTH {
        let settings = settings(true, doorbell);
        let Some(verbs) = Verbs::new(&settings, None) else { return };
        for seed in 0..4 {
            assert_eq!(run(&verbs, &hostile(seed, &settings, Plant::Nothing)), Ok(()), "seed {seed}");
        }
    }
}

#[test]
fn a_fence_that_is_missing_before_the_index_is_found() {
    let without = "\n#if EP_MLX5_DOUBLE_BELL\n    ep_st_register((void*)q->bell, bell);\n#endif\n";
    is_found("double", &settings(true, Doorbell::Double), (FENCE_BEFORE_INDEX, without), &[]);
    // With a single bell the other fence comes after the elements, too: what is lost is that the record comes after them.
    let settings = settings(true, Doorbell::Single);
    is_found(
        "single",
        &settings,
        (LAST_BELL, "    ep_st_register((void*)q->bell, bell);\n    q->rung = q->posted;"),
        &[],
    );
}

#[test]
fn a_fence_of_the_own_device_alone_is_found() {
    let own = FENCE_BEFORE_INDEX.replace("ep_fence_sys", "ep_fence_device");
    is_found("double", &settings(true, Doorbell::Double), (FENCE_BEFORE_INDEX, &own), &[]);
    let own = LAST_BELL.replace("ep_fence_sys", "ep_fence_device");
    is_found("single", &settings(true, Doorbell::Single), (LAST_BELL, &own), &[]);
}

#[test]
fn a_bell_before_its_element_is_found() {
    let settings = settings(true, Doorbell::Single);
    let at = "    EpUnit* at = (EpUnit*)(q->elements";
    let rung = "    q->posted += 1;\n    ep_mlx5_ring(q);\n    q->posted -= 1;\n    EpUnit* at = (EpUnit*)(q->elements";
    is_found("bell first", &settings, (at, rung), &[]);
}

#[test]
fn a_record_that_is_wrong_or_missing_is_found() {
    let settings = settings(true, Doorbell::Single);
    let store = "    ep_st_relaxed4((ep_u32*)q->record, ep_mlx5_big(count));\n";
    is_found("missing", &settings, (store, ""), &[]);
    is_found(
        "the other half",
        &settings,
        (store, "    ep_st_relaxed4((ep_u32*)(q->record - 4), ep_mlx5_big(count));\n"),
        &["Record"],
    );
    is_found(
        "the host's order",
        &settings,
        (store, "    ep_st_relaxed4((ep_u32*)q->record, count);\n"),
        &["Record", "Index"],
    );
    is_found(
        "one more",
        &settings,
        (store, "    ep_st_relaxed4((ep_u32*)q->record, ep_mlx5_big((count + 1) & 0xffff));\n"),
        &[],
    );
}

#[test]
fn an_index_that_is_wrong_is_found() {
    let settings = settings(true, Doorbell::Single);
    let index = "const ep_u32 index = (ep_u32)q->posted & 0xffff;";
    is_found("modulo the depth", &settings, (index, "const ep_u32 index = (ep_u32)q->posted & 63;"), &["Element"]);
    is_found("off by one", &settings, (index, "const ep_u32 index = ((ep_u32)q->posted + 1) & 0xffff;"), &["Element"]);
    let bell = "ep_mlx5_big(count << 8);";
    is_found("bell off by one", &settings, (bell, "ep_mlx5_big(((count + 1) & 0xffff) << 8);"), &[]);
    is_found(
        "another's bell",
        &settings,
        ("ep_mlx5_big(q->number << 8) << 32", "ep_mlx5_big((q->number + 1) << 8) << 32"),
        &["Bell"],
    );
}

#[test]
fn a_place_that_is_used_again_early_is_found() {
    let settings = settings(true, Doorbell::Single);
    let early = ("if (q->posted - q->completed < places) return", "if (q->posted - q->completed < 2 * places) return");
    is_found("early", &settings, early, &["Slot", "Changed", "Element", "Overrun"]);
}

#[test]
fn a_signal_that_does_not_follow_its_rows_is_found() {
    let settings = settings(true, Doorbell::Single);
    let Some(verbs) = Verbs::new(&settings, None) else { return };
    let said = found(&verbs, &settings, Plant::SignalElsewhere).expect("on another queue pair");
    assert!(said.contains("F3"), "{said}");
    let post = "ep_mlx5_post(q, EP_MLX5_FETCH_ADD, 4, q->to + cell, q->cells_key, add, returned, until)";
    // The value itself, inside its element, by the key of the rows.
    let write = "ep_mlx5_post(q, EP_MLX5_WRITE, 3, q->to + cell, q->rows_key, ep_unit((ep_i32)ep_mlx5_big(0x80000008), (ep_i32)bits, (ep_i32)(bits >> 32), 0), returned, until + 0 * add.x)";
    is_found("a write into relaxed memory", &settings, (post, write), &["F3", "F4"]);
    let rows = "ep_mlx5_post(q, EP_MLX5_FETCH_ADD, 4, q->to + cell, q->rows_key, add, returned, until)";
    is_found("a fetch-add into relaxed memory", &settings, (post, rows), &[]);
}

#[test]
fn a_write_that_is_no_signal_is_found() {
    let settings = settings(true, Doorbell::Single).signal(Signal::OrderedWrite);
    let Some(verbs) = Verbs::new(&settings, None) else { return };
    assert_eq!(found(&verbs, &settings, Plant::Nothing), None);
    is_found("into relaxed memory", &settings, ("q->cells_key, value", "q->rows_key, value"), &["F3", "F4"]);
    is_found("without its mark", &settings, ("EP_MLX5_INLINE | 8", "8"), &["Access"]);
    is_found(
        "of the difference",
        &settings,
        ("ep_mlx5_inline(bits), unused", "ep_mlx5_inline(bits - *last), unused"),
        &["F4"],
    );
}

#[test]
fn a_source_that_is_used_again_early_is_found() {
    // Rows of one message: what is read late is read late as a whole.
    let settings = Settings::new().relaxed_ordering(true);
    let Some(verbs) = Verbs::new(&settings, None) else { return };
    let said = found(&verbs, &settings, Plant::SourceReused).expect("a source that is used again");
    assert!(said.contains("F3"), "{said}");
    is_found(
        "a flush that waits for nothing",
        &settings,
        ("    return ep_mlx5_await(q, ticket, until);", "    return EP_FAR_OK;"),
        &["F3"],
    );
}

#[test]
fn completions_that_are_not_counted_in_time_are_found() {
    let store = "    ep_st_relaxed4((ep_u32*)q->read, ep_mlx5_big((ep_u32)q->completed & 0xffffff));\n";
    let single = settings(true, Doorbell::Single);
    is_found("never", &single, (store, ""), &["Overrun"]);
    // The card completes what the first bell told it of, and finds no room.
    let late = FENCE_BEFORE_INDEX.replacen("#endif\n", &format!("#endif\n{store}"), 1);
    let whole = format!("{store}{FENCE_BEFORE_INDEX}");
    is_found("after the first bell", &settings(true, Doorbell::Double), (&whole, &late), &["Overrun"]);
}
