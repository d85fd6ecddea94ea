//! Zombies on GPUs: a rank's process is stopped at a random moment, with kernels under way and calls yet to be launched. The others give
//! it up and recover, and it goes on: no row of theirs is wrong, and nobody else is blamed. Over several nodes, with the loop or adapters that GPUs play between them,
//! processes are killed, too, and a node is lost as a whole.
//!
//! Where no GPU is visible, a process of several nodes is killed on GPUs made of software; `EP_TWIN_ALL=1` stops one, too, and one of one node in
//! throughput mode. Every other time calls do not wait for their kernels.
//!
//! `EP_ZOMBIES` says how often in each mode, `EP_SEED` is the first seed, `EP_TIME_FACTOR` stretches all times. The test binary runs
//! itself again as each rank; ranks that share a GPU take turns on it and need a factor.

#[path = "../common/played.rs"]
mod played;
mod rank;

use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use ep_bootstrap::MeetingPlace;
use ep_cuda_twin::{BUILT, Twin};
use libtest_mimic::{Arguments, Trial};
use rand::{Rng as _, SeedableRng as _};
use rand_xoshiro::Xoshiro256PlusPlus;
use rank::{MARK, PLAN, Place, WAITS};
use rustix::process::{Pid, Signal, kill_process};

/// All ranks are at work: one is stopped within so long. Many rounds.
const MOMENT: Duration = Duration::from_millis(60);
/// The others have recovered: it goes on within so long.
const RETURN: Duration = Duration::from_millis(60);
/// More than anything takes that works: kernels are compiled, too.
const LONG: Duration = Duration::from_secs(120);

/// What is done to a rank.
#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    plan: &'static str,
    /// Killed, or stopped and let go on.
    kills: bool,
}

const CASES: [Case; 7] = [
    Case {
        name: "a_gpu_rank_that_goes_on_after_it_was_given_up_harms_nobody_in_low_latency",
        plan: rank::LOW_LATENCY,
        kills: false,
    },
    Case {
        name: "a_gpu_rank_that_goes_on_after_it_was_given_up_harms_nobody_in_throughput_mode",
        plan: rank::THROUGHPUT,
        kills: false,
    },
    Case { name: "a_killed_gpu_rank_takes_its_node_along_and_the_others_go_on", plan: rank::NODES, kills: true },
    Case { name: "a_gpu_rank_that_goes_on_after_its_node_was_given_up_harms_nobody", plan: rank::NODES, kills: false },
    Case {
        name: "a_gpu_rank_that_goes_on_after_its_node_was_given_up_harms_nobody_in_low_latency",
        plan: rank::LOW_NODES,
        kills: false,
    },
    Case {
        name: "a_killed_gpu_rank_whose_adapter_its_gpu_played_takes_its_node_along_and_the_others_go_on",
        plan: rank::PLAYED,
        kills: true,
    },
    Case {
        name: "a_gpu_rank_that_goes_on_after_its_node_was_given_up_harms_nobody_over_adapters",
        plan: rank::PLAYED,
        kills: false,
    },
];

/// A number of the environment.
fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap_or_else(|_| panic!("{name} is `{text}`")))
}

fn factor() -> u32 {
    number("EP_TIME_FACTOR", 1).try_into().expect("a small factor")
}

/// A rank that was started. Dropped, it is killed.
struct Started {
    process: Child,
    said: Receiver<String>,
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Case {
    fn has_nodes(self) -> bool {
        [rank::NODES, rank::LOW_NODES, rank::PLAYED].contains(&self.plan)
    }
}

impl Started {
    fn new(place: Place, plan: &str, waits: bool, twin: Option<&Path>) -> Result<Self, String> {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(program);
        command.env(PLAN, plan).env(WAITS, u8::from(waits).to_string()).envs(place.variables()).stdout(Stdio::piped());
        command.envs(twin.map(|folder| (BUILT, folder)));
        let mut process = command.spawn().map_err(|error| error.to_string())?;
        let (says, said) = channel();
        let out = process.stdout.take().ok_or("no output of a rank")?;
        thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if let Some(word) = line.strip_prefix(MARK) {
                    let _ = says.send(word.to_owned());
                }
            }
        });
        Ok(Self { process, said })
    }

    fn hear(&self) -> Result<String, String> {
        self.said.recv_timeout(LONG * factor()).map_err(|error| format!("a rank says nothing: {error}"))
    }

    fn signal(&self, signal: Signal) -> Result<(), String> {
        kill_process(Pid::from_child(&self.process), signal).map_err(|error| error.to_string())
    }
}

/// Where all of some ranks say the same.
fn all_say<'a>(ranks: impl IntoIterator<Item = (usize, &'a Started)>, word: &str) -> Result<(), String> {
    for (rank, started) in ranks {
        let said = started.hear()?;
        if said != word {
            return Err(format!("rank {rank} said `{said}`, expected `{word}`"));
        }
    }
    Ok(())
}

/// Stops or kills one of `world` ranks, by the draws of one seed.
fn haunt(case: Case, world: u32, seed: u64, twin: Option<&Path>) -> Result<(), String> {
    let mut draws = Xoshiro256PlusPlus::seed_from_u64(seed);
    let victim = draws.random_range(0..world as usize);
    let [stopped, gone_on] = [MOMENT, RETURN]
        .map(|limit| Duration::from_micros(draws.random_range(0..(limit * factor()).as_micros() as u64)));
    let told = |problem| {
        format!("EP_SEED={seed}: rank {victim} stopped after {stopped:?}, going on after {gone_on:?} more: {problem}")
    };
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
    let address: SocketAddr = listener.local_addr().map_err(|error| error.to_string())?;
    let _place = MeetingPlace::hold(listener, world, None).map_err(|error| error.to_string())?;
    // Every other time as users' calls do it. Between nodes the loop's copies would wait for what waits for them.
    let waits = case.has_nodes() || seed.is_multiple_of(2);
    let start = |rank| Started::new(Place { rank, world, address }, case.plan, waits, twin);
    let ranks: Vec<_> = (0..world).map(start).collect::<Result<_, _>>()?;
    // Whoever shares a node with the victim is given up with it.
    let node = |rank: usize| if case.has_nodes() { rank / (world as usize / 2) } else { rank };
    let all = || ranks.iter().enumerate();
    let others = || all().filter(|&(rank, _)| rank != victim);
    let survivors = || all().filter(|&(rank, _)| node(rank) != node(victim));
    all_say(all(), "at work").map_err(told)?;
    thread::sleep(stopped);
    ranks[victim].signal(if case.kills { Signal::KILL } else { Signal::STOP })?;
    all_say(others(), &format!("lost {victim}")).map_err(told)?;
    all_say(survivors(), "recovered").map_err(told)?;
    thread::sleep(gone_on);
    if !case.kills {
        ranks[victim].signal(Signal::CONT)?;
    }
    all_say(survivors(), "verified").map_err(told)?;
    all_say(survivors(), "left its window").map_err(told)?;
    // Whomever it blames itself: it is told that the others have gone on.
    for (rank, lost) in all().filter(|&(rank, _)| node(rank) == node(victim) && !(case.kills && rank == victim)) {
        let masked = format!("rank {rank} was masked out by the other ranks");
        let said = lost.hear().map_err(told)?;
        if said.contains(&masked) {
            continue;
        }
        match lost.hear() {
            Ok(next) if rank == victim && next.contains(&masked) => {}
            next => return Err(told(format!("rank {rank} said {said:?}, then {next:?}"))),
        }
    }
    Ok(())
}

/// Two ranks close a communicator of which graphs live, and make another one on the same meeting. The calls are the same, in the same order; when a graph
/// is dropped is each rank's own matter.
fn close_with_graphs(plan: &str, twin: Option<&Path>) -> Result<(), String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
    let address: SocketAddr = listener.local_addr().map_err(|error| error.to_string())?;
    let _place = MeetingPlace::hold(listener, 2, None).map_err(|error| error.to_string())?;
    let start = |rank| Started::new(Place { rank, world: 2, address }, plan, true, twin);
    let ranks: Vec<_> = (0..2).map(start).collect::<Result<_, _>>()?;
    ["at work", "closed it", "made another"].into_iter().try_for_each(|word| all_say(ranks.iter().enumerate(), word))
}

fn main() -> ExitCode {
    if let Ok(plan) = std::env::var(PLAN) {
        // Of the program that started this one, where it has a twin.
        let _twin = std::env::var_os(BUILT).map(|_| Twin::start().expect("the twin that was built"));
        rank::act(&plan);
        return ExitCode::SUCCESS;
    }
    let gpus = ep_cuda::driver::devices();
    let absent = match &gpus {
        Ok(0) => Some("a GPU; none is visible".to_owned()),
        Ok(_) => ep_cuda::build::version().err().map(|error| error.to_string()),
        Err(error) => Some(error.to_string()),
    };
    let twin = absent.as_ref().map(|_| Twin::build());
    assert!(
        !matches!(twin, Some(Err(_))) || std::env::var_os("CI").is_none(),
        "the twin of a GPU does not start: {twin:?}"
    );
    let twin = twin.and_then(Result::ok);
    let on_twin = twin.as_ref().map(|twin| twin.folder().to_owned());
    let gpus = gpus.unwrap_or(0);
    let world = if gpus >= 4 { 4 } else { 3 };
    let trial = |case: Case| {
        let nodes = case.has_nodes();
        let all = std::env::var_os("EP_TWIN_ALL").is_some();
        let takes = on_twin.is_some() && (if nodes { case.kills || all } else { all && case.plan == rank::THROUGHPUT });
        // Each rank plays its adapter on a GPU of its own, if there are two.
        let of_nodes = if case.plan == rank::PLAYED && (1..4).contains(&gpus) { 2 } else { 4 };
        let (world, on_twin) = (if nodes { of_nodes } else { world }, on_twin.clone());
        match absent.clone().filter(|_| !takes) {
            Some(reason) => {
                let kind = format!("skipped: {reason}");
                Trial::test(case.name, move || Err(reason.into())).with_kind(kind).with_ignored_flag(true)
            }
            None => Trial::test(case.name, move || {
                let first = number("EP_SEED", 1);
                let often = number("EP_ZOMBIES", if on_twin.is_some() { 1 } else { 4 });
                (first..first + often).try_for_each(|seed| Ok(haunt(case, world, seed, on_twin.as_deref())?))
            }),
        }
    };
    let mut arguments = Arguments::from_args();
    // Moments are of ranks that have the GPUs to themselves.
    arguments.test_threads = Some(1);
    let closing = [
        ("a_communicator_whose_graphs_live_is_closed_and_the_meeting_stays_whole", rank::GRAPHS),
        ("a_communicator_whose_graph_one_rank_keeps_is_closed_by_all", rank::ONE_GRAPH),
    ];
    let closing = closing.into_iter().map(|(name, plan)| {
        let on_twin = on_twin.clone();
        match absent.clone().filter(|_| on_twin.is_none()) {
            Some(reason) => Trial::test(name, move || Err(reason.into())).with_ignored_flag(true),
            None => Trial::test(name, move || Ok(close_with_graphs(plan, on_twin.as_deref())?)),
        }
    });
    libtest_mimic::run(&arguments, CASES.into_iter().map(trial).chain(closing).collect()).exit_code()
}
