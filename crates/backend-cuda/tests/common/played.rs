//! Ranks that are processes, over adapters that their GPUs play.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use ep_bootstrap::Member;
use ep_core::{Error, Rank};
use ep_cuda::hca::{Hca, Pace};
use ep_cuda::{Builder, PostingGpu};
use ep_ibgda::{Ibgda, Library, Settings};

/// Settings of jobs that are over soon: short queues, and adapters that give up after two seconds. (Whose queue breaks finds out by polling it, and
/// may get no processor for a while. Were its peer to miss its answers before, that would be named.)
pub fn settings() -> Settings {
    let settings = Settings::new().relaxed_ordering(true).log_depth(6);
    settings.and_then(|settings| settings.ack_timeout(17)?.retries(3)).expect("settings")
}

/// The rank of a process over an adapter that its GPU plays, with those of the others' processes. `builder` is what a case asks for.
pub fn apart(builder: Builder, pace: Pace, member: &Member) -> Result<Builder, Error> {
    let present = ep_cuda::driver::devices()?;
    let gpu = member.rank().index() % present;
    let hca = Hca::between_processes(gpu, pace, member)?;
    // SAFETY: the cards' functions are those of the interface.
    let library = unsafe { Library::from(soft_hca::symbol) }.expect("it has all functions");
    let network = move |me: Rank, gpu: PostingGpu| {
        Ibgda::new(library.clone(), gpu.beside(&hca), settings().devices([hca.adapter(me.index())]))
    };
    Ok(builder.gpus(vec![gpu]).posted(ep_ibgda::source(&settings()), network))
}
