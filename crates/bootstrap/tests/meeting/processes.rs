//! Real processes, which can be killed. The test binary runs itself again as the other rank.

use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ep_bootstrap::{Environment, Member, Secret, Settings, Verdict};
use ep_core::machine::{Bootstrap as _, Proposal};
use ep_core::{Fault, Nanos, Rank, RankSet};
use futures_executor::block_on;

use super::{LONG, SHORT, listener, set, settings};

/// Told by the variables of a launcher.
#[test]
#[ignore = "no test by itself: the body of a rank that another test starts"]
fn a_rank_that_was_started() {
    let plan = std::env::var_os("EP_BOOTSTRAP_TEST_PLAN").expect("the test that starts it says what it is to do");
    let within = if plan == "crowd" || plan == "full" { SHORT * 20 } else { LONG };
    let more = || std::fs::File::open("/dev/null").ok();
    let held: Vec<_> = std::iter::from_fn(more).take(if plan == "full" { usize::MAX } else { 0 }).collect();
    let joined = Member::join(
        Settings::of(&Environment::detect().unwrap())
            .secret(Secret::detect().unwrap())
            .identity(ep_bootstrap::Identity::new().number("hidden", 7168).number("layout hash", 5))
            .within(within),
    );
    if plan == "crowd" || plan == "full" {
        drop(held);
        println!("{}", joined.map(drop).unwrap_err());
        return;
    }
    let member = joined.unwrap();
    if plan == "gather" {
        member.all_gather(&[member.rank().0 as u8], LONG).unwrap();
        member.barrier(LONG).unwrap();
    } else {
        member.barrier(LONG).unwrap();
        // Waits to be killed.
        let _ = member.barrier(LONG);
    }
}

/// Kills what it holds.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(rank: u32, world: u32, address: &str, plan: &str) -> Killed {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "processes::a_rank_that_was_started"]).stdout(Stdio::null());
    prepare(&mut command, rank, world, address, plan);
    Killed(command.spawn().unwrap())
}

/// What a launcher would tell the process.
fn prepare(command: &mut Command, rank: u32, world: u32, address: &str, plan: &str) {
    let (host, port) = address.split_once(':').unwrap();
    let (rank, world) = (rank.to_string(), world.to_string());
    command.env("EP_BOOTSTRAP_TEST_PLAN", plan).env("MOEXPRESS_SECRET", "test");
    command.env("RANK", &rank).env("WORLD_SIZE", &world).env("LOCAL_RANK", &rank).env("LOCAL_WORLD_SIZE", &world);
    command.env("MASTER_ADDR", host).env("MASTER_PORT", port);
}

/// Rank 0, which holds the meeting place, may have 24 descriptors, for 32 ranks.
#[cfg(unix)]
#[test]
fn descriptors_that_run_out_are_said_to_the_ranks() {
    const WORLD: u32 = 32;
    let (listener, address) = listener();
    drop(listener);
    let mut host = Command::new("sh");
    let program = std::env::current_exe().unwrap();
    let run = "ulimit -n 24 && exec \"$0\" --ignored --exact processes::a_rank_that_was_started --nocapture";
    host.args(["-c", run]).arg(program).stdout(Stdio::piped()).stderr(Stdio::null());
    prepare(&mut host, 0, WORLD, &address, "crowd");
    let host = host.spawn().unwrap();
    // Its time has begun by then, and theirs has not.
    let began = Instant::now();
    while TcpStream::connect(&address).is_err() {
        assert!(began.elapsed() < LONG, "nobody is at the meeting place");
        std::thread::sleep(Duration::from_millis(5));
    }
    let errors: Vec<String> = std::thread::scope(|scope| {
        let join = |rank| Member::join(settings(rank, WORLD, &address).within(SHORT * 20)).map(drop).unwrap_err();
        let threads: Vec<_> = (1..WORLD).map(|rank| scope.spawn(move || join(rank).to_string())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let said = String::from_utf8(host.wait_with_output().unwrap().stdout).unwrap();
    // Those who came before rank 0 may have left none for its own connection.
    assert!(said.contains("no file descriptors are left"), "{said}");
    let untold: Vec<_> = errors.iter().filter(|error| !error.contains("no file descriptors are left")).collect();
    assert!(untold.is_empty(), "{} of {}: {untold:#?}", untold.len(), errors.len());
}

/// A rank that has all the descriptors that it may have.
#[cfg(unix)]
#[test]
fn a_rank_without_descriptors_says_so() {
    let (_listener, address) = listener();
    let mut command = Command::new("sh");
    let run = "ulimit -n 40 && exec \"$0\" --ignored --exact processes::a_rank_that_was_started --nocapture";
    command.args(["-c", run]).arg(std::env::current_exe().unwrap()).stderr(Stdio::null());
    prepare(&mut command, 1, 2, &address, "full");
    let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
    assert!(said.contains("no file descriptors are left for connections in this process"), "{said}");
}

#[test]
fn processes_meet_as_a_launcher_tells_them() {
    let (listener, address) = listener();
    let mut others: Vec<Killed> = (1..4).map(|rank| start(rank, 4, &address, "gather")).collect();
    let member = Member::host(listener, settings(0, 4, &address)).unwrap();
    assert_eq!(member.all_gather(&[0], LONG).unwrap(), [0, 1, 2, 3].map(|rank| Some(vec![rank])));
    member.barrier(LONG).unwrap();
    assert!(others.iter_mut().all(|other| other.0.wait().unwrap().success()));
}

#[test]
fn a_process_that_dies_during_an_all_gather_ends_it_at_once() {
    let (listener, address) = listener();
    let mut other = start(1, 2, &address, "die");
    let member = Member::host(listener, settings(0, 2, &address)).unwrap();
    member.barrier(LONG).unwrap();
    let start = Instant::now();
    let killer = std::thread::spawn(move || other.0.kill().map(|()| other));
    // Rank 1 waits in another collective or is dead already.
    let error = member.all_gather(&[0], LONG).unwrap_err();
    let told = matches!(error.verdict(), Some(Verdict::Lost { .. } | Verdict::Mismatch(_)));
    assert!(told && start.elapsed() < LONG / 2, "{error}");
    killer.join().unwrap().unwrap();
    super::until_lost(&member, 1);
}

#[test]
fn a_process_that_dies_during_an_agreement_is_named_and_can_be_masked_out() {
    let (listener, address) = listener();
    let mut other = start(1, 2, &address, "die");
    let member = Member::host(listener, settings(0, 2, &address)).unwrap();
    member.barrier(LONG).unwrap();
    let agree = |mask: RankSet| {
        let deadline = member.now() + Nanos::from_secs(20);
        block_on(member.agree(Proposal { mask, generation: 0, op: 1 }, deadline))
    };
    let killer = std::thread::spawn(move || {
        std::thread::sleep(SHORT);
        other.0.kill().map(|()| other)
    });
    let fault = agree(set(&[])).unwrap_err().failure().unwrap().fault;
    assert!(matches!(fault, Fault::PeerGone { peer: Rank(1), .. }), "{fault}");
    killer.join().unwrap().unwrap();
    assert_eq!(agree(set(&[1])).unwrap().mask, set(&[1]));
    assert_eq!(member.all_gather(&[5], LONG).unwrap(), [Some(vec![5]), None]);
}
