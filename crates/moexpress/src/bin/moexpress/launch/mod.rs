//! `moexpress launch`: the processes of a job on this machine.

mod endings;
mod guard;
mod job;
mod output;
mod process;
mod signals;

use std::net::TcpListener;
use std::process::Command;

use ep_bootstrap::{MEETING_VARIABLE, MeetingPlace, SECRET_VARIABLE, Secret};

pub(crate) use self::guard::guard;
use self::job::Job;
use self::output::Printer;
use self::signals::Signals;
pub(crate) use self::signals::survive_large_files;
use crate::args::LaunchArgs;
use crate::failure::Failure;

/// Where the processes meet. They are all on this machine, so nobody else needs to reach it.
const ADDRESS: &str = "127.0.0.1";

/// Starts everything, and returns when nothing of it runs any more.
pub(crate) fn launch(args: &LaunchArgs) -> Result<String, Failure> {
    let LaunchArgs { n, nodes, .. } = *args;
    if n % nodes != 0 {
        return Err(Failure::bad_input(format_args!(
            "{n} processes on {nodes} nodes, allowed: the same number on every node"
        )));
    }
    // Before the first process starts: from then on, nothing may end this one without ending them.
    let mut signals =
        Signals::new().map_err(|error| Failure::failed(format_args!("cannot wait for signals: {error}")))?;
    let secret = Secret::generate().map_err(Failure::failed)?;
    let port = args.master_port.map_or_else(free_port, Ok)?;
    // Here rather than in rank 0's process, so that ranks that go on without another may be any. Other libraries meet at
    // the master port.
    let (place, meeting) = hold_meeting_place(n, secret.clone())?;
    let secret = secret.to_hex();
    let mut printer = Printer::new(n);
    let mut job = Job::new(args.grace, args.keep_going)?;
    for rank in 0..n {
        let mut command = command(args, rank);
        command.env("MASTER_PORT", port.to_string()).env(SECRET_VARIABLE, &secret).env(MEETING_VARIABLE, &meeting);
        if let Err(error) = job.start(rank, command, &mut printer) {
            job.kill_all();
            let program = args.command[0].display();
            return Err(Failure::bad_input(format_args!("cannot start '{program}': {error}")));
        }
    }
    let end = job.run(&mut signals, &printer, &place);
    let last = printer.finish(job.patience(), || !signals.pending().is_empty());
    // Of a job that has failed that is what to say.
    end.and_then(|text| last.map(|()| text).map_err(|why| job.unread(why)))
}

/// The command of one rank, with what torchrun would set.
fn command(args: &LaunchArgs, rank: u32) -> Command {
    let local_world = args.n / args.nodes;
    let mut command = Command::new(&args.command[0]);
    command.args(&args.command[1..]);
    for (name, value) in [
        ("RANK", rank),
        ("WORLD_SIZE", args.n),
        ("LOCAL_RANK", rank % local_world),
        ("LOCAL_WORLD_SIZE", local_world),
        ("GROUP_RANK", rank / local_world),
    ] {
        command.env(name, value.to_string());
    }
    command.env("MASTER_ADDR", ADDRESS);
    command
}

/// Opens the meeting place of `world` ranks, and says where it is.
fn hold_meeting_place(world: u32, secret: Secret) -> Result<(MeetingPlace, String), Failure> {
    let failed = |error: std::io::Error| Failure::failed(format_args!("no free port: {error}"));
    let listener = TcpListener::bind((ADDRESS, 0)).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?.to_string();
    Ok((MeetingPlace::hold(listener, world, Some(secret)).map_err(Failure::failed)?, address))
}

/// A port that nobody uses now. Somebody may until rank 0 does: then rank 0 says so, and `--master-port` helps.
fn free_port() -> Result<u16, Failure> {
    let port = TcpListener::bind((ADDRESS, 0)).and_then(|listener| listener.local_addr());
    port.map(|address| address.port()).map_err(|error| Failure::failed(format_args!("no free port: {error}")))
}
