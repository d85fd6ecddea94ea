//! Real processes, which can be killed. The test binary runs itself again as the other rank.

use std::process::{Child, Command, Stdio};
use std::time::Instant;

use ep_bootstrap::{Environment, Member, Secret, Settings, Verdict};
use ep_core::machine::{Bootstrap as _, Proposal};
use ep_core::{Fault, Nanos, Rank, RankSet};
use futures_executor::block_on;

use super::{LONG, listener, set, settings};

/// Not a test by itself: the body of a rank that another test started, told by the variables of a launcher.
#[test]
fn a_rank_that_was_started() {
    let Some(plan) = std::env::var_os("EP_BOOTSTRAP_TEST_PLAN") else { return };
    let member = Member::join(
        Settings::of(&Environment::detect().unwrap())
            .secret(Secret::detect().unwrap())
            .identity(ep_bootstrap::Identity::new().number("hidden", 7168).number("layout hash", 5)),
    )
    .unwrap();
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
    let (host, port) = address.split_once(':').unwrap();
    let (rank, world) = (rank.to_string(), world.to_string());
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "processes::a_rank_that_was_started"]).stdout(Stdio::null());
    command.env("EP_BOOTSTRAP_TEST_PLAN", plan).env("MOEXPRESS_SECRET", "test");
    command.env("RANK", &rank).env("WORLD_SIZE", &world).env("LOCAL_RANK", &rank).env("LOCAL_WORLD_SIZE", &world);
    command.env("MASTER_ADDR", host).env("MASTER_PORT", port);
    Killed(command.spawn().unwrap())
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
        std::thread::sleep(super::SHORT);
        other.0.kill().map(|()| other)
    });
    let fault = agree(set(&[])).unwrap_err().failure().unwrap().fault;
    assert!(matches!(fault, Fault::PeerGone { peer: Rank(1), .. }), "{fault}");
    killer.join().unwrap().unwrap();
    assert_eq!(agree(set(&[1])).unwrap().mask, set(&[1]));
    assert_eq!(member.all_gather(&[5], LONG).unwrap(), [Some(vec![5]), None]);
}
