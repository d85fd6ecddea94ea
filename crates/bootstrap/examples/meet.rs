//! Ranks meet, gather what each knows, and agree on how to go on without one that gave up.
//!
//! `cargo run -p ep-bootstrap --example meet` does it with four threads; under a launcher, for instance
//! `moexpress launch -n 4 -- target/debug/examples/meet`, each process is one rank.

use std::error::Error;
use std::net::TcpListener;
use std::time::Duration;

use ep_bootstrap::{Environment, EnvironmentError, Identity, Member, Secret, Settings};
use ep_core::machine::{Bootstrap as _, Proposal};
use ep_core::{Nanos, Rank, RankSet};
use futures_executor::block_on;

/// How long anything may take.
const WITHIN: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn Error>> {
    match Environment::detect() {
        Ok(environment) => {
            let settings = Settings::of(&environment).secret(Secret::detect()?).within(WITHIN);
            meet(&Member::join(settings.identity(identity()))?)
        }
        Err(EnvironmentError::NotLaunched) => threads(4),
        Err(error) => Err(error.into()),
    }
}

/// What all ranks must have in common.
fn identity() -> Identity {
    Identity::new().number("hidden", 7168).number("experts", 256).text("element", "bf16")
}

fn threads(world: u32) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    let settings = |rank| Settings::new(Rank(rank), world, &address).identity(identity()).within(WITHIN);
    std::thread::scope(|scope| {
        for rank in 1..world {
            let settings = settings(rank);
            scope.spawn(move || {
                let met = Member::join(settings).map_err(Into::into).and_then(|member| meet(&member));
                met.unwrap_or_else(|error: Box<dyn Error>| eprintln!("rank {rank}: {error}"));
            });
        }
        meet(&Member::host(listener, settings(0))?)
    })
}

fn meet(member: &Member) -> Result<(), Box<dyn Error>> {
    let (rank, world) = (member.rank(), member.world());
    let handles = member.all_gather(format!("the handle of rank {rank}").as_bytes(), WITHIN)?;
    let lengths: Vec<usize> = handles.iter().flatten().map(Vec::len).collect();
    println!("rank {rank} of {world} gathered handles of {lengths:?} bytes");

    // The last rank plays one that the others lose.
    let last = Rank(world - 1);
    if rank == last && world > 1 {
        println!("rank {rank} leaves");
        return Ok(());
    }
    let mask: RankSet = (world > 1).then_some(last).into_iter().collect();
    let proposal = Proposal { mask, generation: 0, op: u64::from(rank.0) };
    let agreement = block_on(member.agree(proposal, member.now() + Nanos::from_secs(10)))?;
    println!("rank {rank} goes on in generation {}, operation {}", agreement.generation, agreement.op);
    // Rank 0 holds the meeting place, so nobody leaves before all are done.
    Ok(member.barrier(WITHIN)?)
}
