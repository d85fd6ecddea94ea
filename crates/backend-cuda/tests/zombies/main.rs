//! Zombies on GPUs: a rank's process is stopped at a random moment, with kernels under way and calls yet to be launched. The others give
//! it up and recover, and it goes on: no row of theirs is wrong, and nobody else is blamed.
//!
//! `EP_ZOMBIES` says how often in each mode, `EP_SEED` is the first seed, `EP_TIME_FACTOR` stretches all times. The test binary runs
//! itself again as each rank; ranks that share a GPU take turns on it and need a factor.

mod rank;

use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use ep_bootstrap::MeetingPlace;
use libtest_mimic::{Arguments, Trial};
use rand::{Rng as _, SeedableRng as _};
use rand_xoshiro::Xoshiro256PlusPlus;
use rank::{MARK, PLAN, Place};
use rustix::process::{Pid, Signal, kill_process};

/// All ranks are at work: one is stopped within so long. Many rounds.
const MOMENT: Duration = Duration::from_millis(60);
/// The others have recovered: it goes on within so long.
const RETURN: Duration = Duration::from_millis(60);
/// More than anything takes that works: kernels are compiled, too.
const LONG: Duration = Duration::from_secs(120);

const CASES: [(&str, &str); 2] = [
    ("a_gpu_rank_that_goes_on_after_it_was_given_up_harms_nobody_in_low_latency", rank::LOW_LATENCY),
    ("a_gpu_rank_that_goes_on_after_it_was_given_up_harms_nobody_in_throughput_mode", rank::THROUGHPUT),
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

impl Started {
    fn new(place: Place, plan: &str) -> Result<Self, String> {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(program);
        command.env(PLAN, plan).envs(place.variables()).stdout(Stdio::piped());
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

/// Where all ranks but one say the same.
fn all_say(ranks: &[Started], but: Option<usize>, word: &str) -> Result<(), String> {
    for (rank, started) in ranks.iter().enumerate().filter(|(rank, _)| Some(*rank) != but) {
        let said = started.hear()?;
        if said != word {
            return Err(format!("rank {rank} said `{said}`, expected `{word}`"));
        }
    }
    Ok(())
}

/// Stops one of `world` ranks and lets it go on, by the draws of one seed.
fn haunt(world: u32, seed: u64, plan: &str) -> Result<(), String> {
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
    let start = |rank| Started::new(Place { rank, world, address }, plan);
    let ranks: Vec<_> = (0..world).map(start).collect::<Result<_, _>>()?;
    all_say(&ranks, None, "at work").map_err(told)?;
    thread::sleep(stopped);
    ranks[victim].signal(Signal::STOP)?;
    all_say(&ranks, Some(victim), &format!("lost {victim}")).map_err(told)?;
    all_say(&ranks, Some(victim), "recovered").map_err(told)?;
    thread::sleep(gone_on);
    ranks[victim].signal(Signal::CONT)?;
    all_say(&ranks, Some(victim), "verified").map_err(told)?;
    // Whomever it blames itself: it is told that the others have gone on.
    let masked = format!("rank {victim} was masked out by the other ranks");
    match [ranks[victim].hear().map_err(told)?, ranks[victim].said.recv().unwrap_or_default()] {
        said if said.contains(&masked) => Ok(()),
        said => Err(told(format!("it said {said:?}"))),
    }
}

fn main() -> ExitCode {
    if let Ok(plan) = std::env::var(PLAN) {
        rank::act(&plan);
        return ExitCode::SUCCESS;
    }
    let gpus = ep_cuda::driver::devices();
    let absent = match &gpus {
        Ok(0) => Some("a GPU; none is visible".to_owned()),
        Ok(_) => ep_cuda::build::version().err().map(|error| error.to_string()),
        Err(error) => Some(error.to_string()),
    };
    let world = if gpus.is_ok_and(|gpus| gpus >= 4) { 4 } else { 3 };
    let trial = |(name, plan): (&str, &'static str)| match absent.clone() {
        Some(reason) => {
            let kind = format!("skipped: {reason}");
            Trial::test(name, move || Err(reason.into())).with_kind(kind).with_ignored_flag(true)
        }
        None => Trial::test(name, move || {
            let first = number("EP_SEED", 1);
            (first..first + number("EP_ZOMBIES", 4)).try_for_each(|seed| Ok(haunt(world, seed, plan)?))
        }),
    };
    let mut arguments = Arguments::from_args();
    // Moments are of ranks that have the GPUs to themselves.
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, CASES.into_iter().map(trial).collect()).exit_code()
}
