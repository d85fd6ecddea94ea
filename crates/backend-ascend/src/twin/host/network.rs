//! The way between servers, as HCCL gives it: memory that cards know, and queues, by a context in device memory.

use std::mem::size_of;

use zerocopy::IntoBytes;

use super::Host;
use super::calls::ask;
use super::ipc::{Named, this_process};
use super::objects::Block;
use crate::driver::{
    Code, Completions, Context, DESCRIBED, Described, Detail, ELEMENT, Info, LOCAL_OUTPUT, MEMORIES, Memories, Network,
    REMOTE_INPUT, RT_PARAM_INVALID, Remote, VECTOR_CORES, WorkQueue,
};
use crate::twin::{QueueView, Reach, TwinError};

/// Elements of a queue: few, so that queues are full now and then, and laps are many.
const DEPTH: u32 = 8;
const COMPLETION: u32 = 32;

pub(super) const NETWORK: Network = Network { depth: DEPTH, register, describe, admit, dismiss, connect, close };

/// A queue, and what its elements may name.
#[derive(Clone, Copy, Debug)]
struct Way {
    peer: u32,
    view: QueueView,
    source: Detail,
    target: Detail,
}

fn register(device: u32, at: u64, bytes: u64) -> Result<(), Code> {
    ask(|host| {
        let source = host.detail(device, at, bytes, false)?;
        host.objects.sources.insert(device, source);
        let target = host.detail(device, at, bytes, true)?;
        host.objects.targets.insert(device, target);
        Ok(())
    })
}

/// Of memory that may be shared only.
fn describe(device: u32) -> Result<Described, Code> {
    ask(|host| {
        let source = host.objects.sources.get(&device).ok_or_else(|| unknown(device))?;
        let shared = host.objects.shared.get(&source.address);
        let descriptor =
            *shared.ok_or_else(|| TwinError::Invalid("the memory is not for other processes".to_owned()))?;
        let text = Named { process: this_process(), descriptor, device, bytes: source.bytes }.text();
        let mut described = [0; DESCRIBED];
        described[..text.len()].copy_from_slice(text.as_bytes());
        Ok(described)
    })
}

fn admit(device: u32, described: &Described) -> Result<Remote, Code> {
    let text = described.split(|&byte| byte == 0).next().and_then(|text| str::from_utf8(text).ok());
    let found = ask(|host| {
        let named = text.and_then(Named::parse).filter(|named| named.process != this_process());
        let named = named.ok_or_else(|| TwinError::Invalid("no description of another process's memory".to_owned()))?;
        if host.machine.is_group(device, named.device) {
            return Err(TwinError::Invalid(format!("device {} is of the same server as {device}", named.device)));
        }
        let Some(address) = host.machine.map(named.theirs(), true)? else { return Ok(None) };
        let target = host.detail(named.device, address, named.bytes, true)?;
        host.objects.targets.insert(named.device, target);
        host.objects.admitted.insert(address, named.device);
        Ok(Some(Remote { device: named.device, address, bytes: named.bytes }))
    })?;
    // The other process may be gone.
    found.ok_or(RT_PARAM_INVALID)
}

fn dismiss(_device: u32, remote: &Remote) -> Result<(), Code> {
    ask(|host| {
        host.objects.admitted.remove(&remote.address).ok_or_else(|| unknown(remote.device))?;
        host.objects.targets.remove(&remote.device);
        host.machine.release(remote.address)
    })
}

fn unknown(device: u32) -> TwinError {
    TwinError::Invalid(format!("device is {device}, allowed: one whose memory its card knows"))
}

/// Cards poll by their firmware on some devices, and kernels do on others.
fn connect(device: u32, devices: &[u32], me: u32, peers: &[u32]) -> Result<u64, Code> {
    ask(|host| {
        let ways = peers.iter().map(|&peer| host.way(device, peer, devices)).collect::<Result<Vec<_>, _>>()?;
        // Steps are what the context says, and not the sizes of what is known of the structs.
        let more = 8 * (device % 3);
        let bytes = lay_out(0, me, devices.len() as u32, &ways, more).len() as u64;
        let at = host.machine.alloc(device, bytes, Reach::Own)?;
        host.machine.write(at, &lay_out(at, me, devices.len() as u32, &ways, more))?;
        host.objects.contexts.insert(at, Block { device, bytes });
        Ok(at)
    })
}

fn close(device: u32) -> Result<(), Code> {
    ask(|host| {
        let of = |(&at, block): (&u64, &Block)| (block.device == device).then_some(at);
        for at in host.objects.contexts.iter().filter_map(of).collect::<Vec<_>>() {
            host.objects.contexts.remove(&at);
            host.machine.release(at)?;
        }
        host.machine.close_queues(device)
    })
}

impl Host {
    fn way(&mut self, device: u32, peer: u32, devices: &[u32]) -> Result<Way, TwinError> {
        let to = *devices.get(peer as usize).ok_or_else(|| unknown(peer))?;
        let source = *self.objects.sources.get(&device).ok_or_else(|| unknown(device))?;
        let target = *self.objects.targets.get(&to).ok_or_else(|| unknown(to))?;
        Ok(Way { peer, view: self.machine.queue(device, to, DEPTH, device % 2 == 1)?, source, target })
    }

    /// Memory of a device, with a key by which elements name it.
    fn detail(&mut self, device: u32, at: u64, bytes: u64, is_target: bool) -> Result<Detail, TwinError> {
        let key = self.machine.key(device, at, bytes, is_target)?;
        Ok(Detail { bytes, address: at, key, pad: 0 })
    }
}

/// Bytes of a context that lies at `base`: the struct itself, what it may do, and behind it queues, completions, memories and counts, entries of
/// `more` bytes more than their structs.
fn lay_out(base: u64, me: u32, ranks: u32, ways: &[Way], more: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut room = |len: usize| {
        let at = bytes.len();
        bytes.resize(at + len.next_multiple_of(8), 0);
        at
    };
    let step = |size: usize| size as u32 + more;
    let (queue_bytes, completions_bytes) = (step(size_of::<WorkQueue>()), step(size_of::<Completions>()));
    let (memory_bytes, detail_bytes) = (step(size_of::<Memories>()), step(size_of::<Detail>()));
    let of_all = |step: u32| (ranks * step) as usize;
    let (context, modes, info) = (room(size_of::<Context>()), room(8), room(size_of::<Info>()));
    let (queues, completions) = (room(of_all(queue_bytes)), room(of_all(completions_bytes)));
    let (memories, details) = (room(of_all(memory_bytes)), room(of_all(detail_bytes) * MEMORIES));
    let heads = room(8 * ranks as usize);
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    let address = |at: usize| base + at as u64;
    let all = Context {
        work_space: 0,
        work_space_bytes: 0,
        rank: me,
        ranks,
        window_bytes: ways.first().map_or(0, |way| way.target.bytes),
        windows_in: [0; 32],
        windows_out: [0; 32],
        reserved: [0; 8328],
        is_multi: 1,
        pad: [0; 7],
        data: 0,
        data_bytes: 0,
        info_bytes: size_of::<Info>() as u64,
        info: address(info),
        capability: address(modes),
        capability_bytes: 8,
    };
    put(context, all.as_bytes());
    put(modes, &(VECTOR_CORES | 1).to_le_bytes());
    let head = Info {
        rank: me,
        ranks,
        queues: 1,
        queue_bytes,
        completions_bytes,
        memory_bytes,
        send_queues: address(queues),
        send_completions: address(completions),
        receive_queues: 0,
        receive_completions: 0,
        memories: address(memories),
    };
    put(info, head.as_bytes());
    for Way { peer, view, source, target } in ways {
        let at = *peer as usize;
        let head_at = heads + 8 * at;
        put(head_at, &view.posted.to_le_bytes());
        put(queues + at * queue_bytes as usize, queue_of(view, address(head_at)).as_bytes());
        put(completions + at * completions_bytes as usize, completions_of(view).as_bytes());
        let first = details + at * MEMORIES * detail_bytes as usize;
        let own = Memories { most: MEMORIES as u32, detail_bytes, details: address(first) };
        put(memories + at * memory_bytes as usize, own.as_bytes());
        put(first + LOCAL_OUTPUT * detail_bytes as usize, source.as_bytes());
        put(first + REMOTE_INPUT * detail_bytes as usize, target.as_bytes());
    }
    bytes
}

fn queue_of(view: &QueueView, head: u64) -> WorkQueue {
    WorkQueue {
        number: view.number,
        elements: view.elements,
        element_bytes: ELEMENT,
        depth: view.depth,
        head,
        tail: view.tail,
        doorbell: view.doorbell,
        level: view.level,
        ..WorkQueue::default()
    }
}

fn completions_of(view: &QueueView) -> Completions {
    if view.completions == 0 {
        return Completions::default();
    }
    Completions {
        entries: view.completions,
        entry_bytes: COMPLETION,
        depth: view.completion_depth,
        tail: view.completions_taken,
        ..Completions::default()
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;
    use crate::driver::{AscendError, Route, Routes};

    const BASE: u64 = 1 << 40;
    const RANKS: u32 = 3;

    /// The context of rank 1 with a queue to rank 2.
    fn context(more: u32) -> Vec<u8> {
        let view = QueueView {
            number: 7,
            depth: 8,
            level: 3,
            completion_depth: 8,
            elements: 0x1000,
            doorbell: 0x2000,
            tail: 0x3000,
            completions: 0x4000,
            completions_taken: 0x5000,
            posted: 65530,
            reserved: 0,
        };
        let detail = |key| Detail { bytes: 4096, address: u64::from(key) << 20, key, pad: 0 };
        lay_out(BASE, 1, RANKS, &[Way { peer: 2, view, source: detail(11), target: detail(12) }], more)
    }

    fn read(bytes: &[u8]) -> Result<Route, AscendError> {
        let reader = |at: u64, into: &mut [u8]| {
            let at = at.checked_sub(BASE).map(|at| at as usize);
            let found = at.and_then(|at| bytes.get(at..at + into.len()));
            into.copy_from_slice(found.ok_or(AscendError::Beyond { at: 0, len: into.len(), bytes: bytes.len() })?);
            Ok(())
        };
        Routes::read(&reader, BASE, 1, RANKS)?.to(2)
    }

    #[test]
    fn what_a_context_says_is_read_by_its_own_steps() {
        for more in [0, 8, 24] {
            let route = read(&context(more)).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!((route.source.key, route.target.key, route.target.address), (11, 12, 12 << 20));
            let QueueView { number, depth, level, elements, doorbell, tail, posted, .. } = route.view;
            assert_eq!((number, depth, level, posted), (7, 8, 3, 65530));
            assert_eq!((elements, doorbell, tail), (0x1000, 0x2000, 0x3000));
            assert_eq!((route.view.completions, route.view.completions_taken), (0x4000, 0x5000));
        }
    }

    #[test]
    fn what_a_context_lacks_is_named() {
        let modes = size_of::<Context>();
        let info = modes + 8;
        let queue = info + size_of::<Info>() + 2 * size_of::<WorkQueue>();
        let of_info = |offset: usize| info + offset;
        let wrong: [(usize, u32, &str); 10] = [
            (offset_of!(Context, rank), 0, "rankId is 0"),
            (offset_of!(Context, ranks), 2, "rankNum is 2"),
            (offset_of!(Context, capability_bytes), 0, "capabilitySize is 0"),
            (modes, 3, "dataplaneModeBitmap & 4"),
            (of_info(offset_of!(Info, ranks)), 8, "rankNum of the queues is 8"),
            (of_info(offset_of!(Info, queues)), 0, "qpNum is 0"),
            (of_info(offset_of!(Info, queue_bytes)), 56, "sizeOfAiRMAWQ is 56"),
            (queue + offset_of!(WorkQueue, element_bytes), 128, "wqeSize is 128"),
            (queue + offset_of!(WorkQueue, depth), 12, "depth of a queue"),
            (queue + offset_of!(WorkQueue, doorbell_mode), 1, "dbMode is 1"),
        ];
        for (at, value, said) in wrong {
            let mut bytes = context(0);
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            let error = read(&bytes).expect_err(said).to_string();
            assert!(error.contains(said), "{error}, expected {said}");
        }
    }
}
