//! The windows of ranks that are processes: how they tell each other where these are.

use std::fmt::Display;
use std::mem::size_of;
use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::{Member, Parts};
use ep_core::topology::Reach;
use ep_core::{Error, Layout, Rank};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{Node, Window, register, window};
use crate::driver::{Admitted, DESCRIBED, Device, Exported, Imported, KEY, Key, Memory, done};

/// How long processes wait for each other at least when they meet: one may have to compile kernels first.
const PATIENCE: Duration = Duration::from_secs(60);

/// What each process tells all before windows are shared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Hello {
    /// Of shape, topology and settings.
    settings: u64,
    /// By which others name the process.
    process: i32,
    /// The ordinal of its device.
    device: u32,
    /// Cores of all roles.
    cores: u32,
    pad: u32,
}

/// By which others find a rank's window: those of its server, and those of other servers.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Named {
    near: [u8; KEY],
    far: [u8; DESCRIBED],
}

impl Node {
    /// Of ranks that are processes: this one's window on `device`, whose roles have so many cores, the others' as they name them.
    pub(crate) fn met(
        device: &Arc<Device>,
        layout: &Layout,
        cores: u32,
        member: &Arc<Member>,
        within: Duration,
    ) -> Result<Arc<Self>, Error> {
        let (topology, me) = (*layout.topology(), member.rank());
        let settings = layout.hash_at_start();
        let ordinal = device.ordinal();
        let hello = || Ok(Hello { settings, process: device.process_number()?, device: ordinal, cores, pad: 0 });
        let (own, hellos) = tell(member, hello(), |own| *own, within)?;
        let fit = topology.all().zip(&hellos).try_for_each(|(rank, theirs)| own.fits(rank, theirs));

        let near = topology.all().zip(&hellos).filter(|(rank, _)| topology.reach(me, *rank) == Reach::Near);
        let near: Vec<i32> = near.map(|(_, hello)| hello.process).collect();
        let is_far = topology.nodes() > 1;
        let brought = fit.and_then(|()| bring(device, layout, &near, is_far));
        let ((own, exported, _), names) = tell(member, brought, |(.., names)| *names, within)?;
        let theirs = topology.all().zip(&names).map(|(rank, names)| match topology.reach(me, rank) {
            Reach::Own => Ok(None),
            Reach::Near => Imported::open(device, Key(names.near))
                .map(|window| Some(Window::There(window)))
                .map_err(|error| unreached(rank, error, "the NPUs of a server, in one container, as one user")),
            Reach::Far => Admitted::new(device, &names.far)
                .map(|window| Some(Window::Far(window)))
                .map_err(|error| unreached(rank, error, "cards that reach each other")),
        });
        let theirs: Result<Vec<Option<Window>>, Error> = theirs.collect();
        // Nobody begins before all reach all.
        let theirs = together(member, theirs, within)?;
        let mut own = Some(own);
        let windows = theirs.into_iter().map(|window| window.or_else(|| own.take().map(Window::Here)));
        let windows = windows.collect::<Option<Vec<_>>>().ok_or_else(|| meeting("a rank that meets itself twice"))?;
        let devices = windows.iter().zip(&hellos).map(|(window, hello)| match window {
            Window::Far(admitted) => admitted.remote().device,
            Window::Here(_) | Window::There(_) => hello.device,
        });
        let devices = devices.collect();
        Ok(Arc::new(Self {
            windows,
            devices,
            is_far,
            gone: Vec::new(),
            met: Some((Arc::clone(member), within)),
            exported,
        }))
    }
}

impl Hello {
    /// Whether this rank and `rank`, which said so, can work together.
    fn fits(&self, rank: Rank, theirs: &Self) -> Result<(), Error> {
        let differs = |what: &str, theirs: &dyn Display, own: &dyn Display| {
            Err(Error::invalid(format_args!("{what} of rank {rank}"), theirs, format_args!("{own}, as this rank's")))
        };
        if theirs.settings != self.settings {
            let hash = |settings| format!("{settings:#018x}");
            return differs("hash of shape, topology and settings", &hash(theirs.settings), &hash(self.settings));
        }
        if theirs.cores != self.cores {
            return differs("cores of all roles", &theirs.cores, &self.cores);
        }
        Ok(())
    }
}

/// What a rank brings to the others of its server, `near`, and to those of other servers: its window, by what the system knows it, and its names.
fn bring(
    device: &Arc<Device>,
    layout: &Layout,
    near: &[i32],
    is_far: bool,
) -> Result<(Memory, Option<Exported>, Named), Error> {
    let own = window(device, layout)?;
    let exported = if near.is_empty() { None } else { Some(own.export(near)?) };
    let mut names = Named { near: exported.as_ref().map_or([0; KEY], |it| it.key().0), far: [0; DESCRIBED] };
    if is_far {
        register(&own)?;
        names.far = done("a description of memory", (device.network()?.describe)(device.ordinal()))?;
    }
    Ok((own, exported, names))
}

/// Of what `own` has come to: what all ranks tell, or who has failed, and why.
fn tell<T, N: FromBytes + IntoBytes + Immutable>(
    member: &Member,
    own: Result<T, Error>,
    named: impl Fn(&T) -> N,
    within: Duration,
) -> Result<(T, Vec<N>), Error> {
    let bytes = |own: &T| named(own).as_bytes().to_vec();
    let (own, all) = member.try_all_gather(own, bytes, within.max(PATIENCE), meeting)?;
    Ok((own, told(all)?))
}

/// What `own` has come to, when that of all ranks has gone well.
pub(crate) fn together<T>(member: &Member, own: Result<T, Error>, within: Duration) -> Result<T, Error> {
    member.try_all_gather(own, |_| Vec::new(), within.max(PATIENCE), meeting).map(|(own, _)| own)
}

/// Tells the others, which have begun to meet, what has failed here before.
pub(crate) fn tell_failed(member: &Member, error: &Error, within: Duration) {
    member.tell_failed(error, within.max(PATIENCE));
}

/// What all ranks told.
fn told<T: FromBytes + IntoBytes>(all: Parts) -> Result<Vec<T>, Error> {
    let of = |(rank, told): (u32, Option<Vec<u8>>)| {
        let told = told.ok_or_else(|| meeting(format_args!("rank {rank} was given up")))?;
        let wrong = |_| meeting(format_args!("rank {rank} told {} bytes, expected {}", told.len(), size_of::<T>()));
        T::read_from_bytes(&told).map_err(wrong)
    };
    (0..).zip(all).map(of).collect()
}

fn meeting(problem: impl Display) -> Error {
    Error::broken(
        "the meeting of the ranks",
        problem,
        "look at what the rank that is named printed, and start all anew",
    )
}

/// A window that this rank does not reach.
fn unreached(rank: Rank, error: impl Display, needs: &str) -> Error {
    Error::unsupported(format_args!("the window of rank {rank} ({error})"), needs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_tell_is_checked() {
        let own = Hello { settings: 7, process: 3, device: 0, cores: 48, pad: 0 };
        let said = |theirs: Hello| own.fits(Rank(2), &theirs).unwrap_err().to_string();
        assert!(own.fits(Rank(2), &Hello { process: 4, device: 1, ..own }).is_ok());
        assert_eq!(said(Hello { cores: 40, ..own }), "cores of all roles of rank 2 is 40, allowed: 48, as this rank's");
        assert!(said(Hello { settings: 8, ..own }).starts_with("hash of shape, topology and settings of rank 2 is 0x"));
        let complaint = |parts: Vec<Option<Vec<u8>>>| told::<Hello>(parts).unwrap_err().to_string();
        assert!(
            complaint(vec![Some(own.as_bytes().to_vec()), Some(vec![1; 5])])
                .contains("rank 1 told 5 bytes, expected 24")
        );
        assert!(complaint(vec![None]).contains("rank 0 was given up"));
    }
}
