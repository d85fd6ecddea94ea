//! Streams and events: work is done in a stream's order, and two streams know nothing of each other but by events.
//!
//! Launches of a device run one after the other, whatever their streams. A copy is late by some looks, so that who does not wait for it finds
//! other bytes.

use std::ffi::c_void;

use super::calls::{code, give};
use super::objects::{Place, Stream, Work};
use super::{Host, TURNS_A_LOOK, answer};
use crate::driver::{
    Code, DEVICE_TO_DEVICE, EVENT_COMPLETE, RT_INVALID_HANDLE, RT_LOST_HEARTBEAT, RT_PARAM_INVALID, RT_STREAM_CONTEXT,
    RT_VECTOR_CORE_EXCEPTION, STOP_ON_FAILURE, SUCCESS,
};

impl Stream {
    /// The place behind all that it holds.
    fn end(&self) -> u64 {
        self.ended + self.queue.len() as u64
    }

    /// The last launch before `work`, of the `launches` that the machine has: all of them, where this stream waits for another one.
    fn last_before(&self, work: u64, launches: u64) -> u64 {
        let before = usize::try_from(work.saturating_sub(self.ended)).unwrap_or(usize::MAX);
        let last = |work: &Work| match work {
            Work::Launch { number, .. } => *number,
            Work::Wait { .. } => Some(launches),
            Work::Copy { .. } => None,
        };
        self.queue.iter().take(before).filter_map(last).max().unwrap_or(self.launched)
    }
}

impl Host {
    /// The device of a stream, which must be the thread's.
    pub(super) fn stream(&mut self, call: &'static str, stream: *mut c_void) -> Result<u32, Code> {
        let device = self.device(call)?;
        match self.objects.streams.get(&(stream as u64)).map(|stream| stream.device) {
            None => Err(self.refuse(call, RT_INVALID_HANDLE, "no such stream")),
            Some(of) if of != device => Err(self.refuse(
                call,
                RT_STREAM_CONTEXT,
                format_args!("a stream of device {of}, the thread's is {device}"),
            )),
            Some(_) => Ok(device),
        }
    }

    /// Gives a stream work. Launches go to the machine as soon as nothing else stands before them.
    pub(super) fn enqueue(&mut self, stream: *mut c_void, work: Work) -> Result<(), Code> {
        if let Some(stream) = self.objects.streams.get_mut(&(stream as u64)) {
            stream.queue.push_back(work);
        }
        self.hand_over(stream as u64)
    }

    fn hand_over(&mut self, stream: u64) -> Result<(), Code> {
        let Some(stream) = self.objects.streams.get_mut(&stream) else { return Ok(()) };
        for work in &mut stream.queue {
            let Work::Launch { kernel, blocks, at, number } = work else { break };
            if number.is_some() {
                continue;
            }
            if let Err(error) = self.machine.launch(stream.device, kernel, *blocks, *at) {
                return Err(self.refuse("aclrtLaunchKernelWithConfig", RT_PARAM_INVALID, error));
            }
            let launches = &mut self.objects.launches[stream.device as usize];
            *launches += 1;
            *number = Some(*launches);
        }
        Ok(())
    }

    /// Whether a place was reached.
    fn has_come(&self, place: Place) -> bool {
        self.objects.streams.get(&place.stream).is_none_or(|stream| stream.ended >= place.work)
    }

    /// Lets streams go on, as far as the machine has.
    fn go_on(&mut self) {
        let streams: Vec<u64> = self.objects.streams.keys().copied().collect();
        for stream in streams {
            while self.end_first(stream) {}
            // What is wrong with a launch has been noted.
            let _ = self.hand_over(stream);
        }
    }

    /// Ends the first work of a stream, if it can end now.
    fn end_first(&mut self, handle: u64) -> bool {
        let Some(stream) = self.objects.streams.get_mut(&handle) else { return false };
        let (device, mut launched) = (stream.device, stream.launched);
        let ended = match stream.queue.front_mut() {
            Some(Work::Launch { number: Some(number), .. }) => {
                launched = *number;
                self.machine.launches_ended(device).is_ok_and(|ended| ended >= launched)
            }
            Some(Work::Copy { late, .. }) if *late > 0 => {
                *late -= 1;
                false
            }
            Some(&mut Work::Copy { to, from, bytes, .. }) => {
                self.copy_now(to, from, bytes);
                true
            }
            Some(&mut Work::Wait { place, .. }) => self.has_come(place),
            Some(Work::Launch { number: None, .. }) | None => false,
        };
        if ended && let Some(stream) = self.objects.streams.get_mut(&handle) {
            stream.launched = launched;
            stream.ended += 1;
            stream.queue.pop_front();
        }
        ended
    }

    fn copy_now(&mut self, to: u64, from: u64, bytes: u64) {
        let mut copied = vec![0; bytes as usize];
        let done = self.machine.read_into(from, &mut copied).and_then(|()| self.machine.write(to, &copied));
        if let Err(error) = done {
            self.refuse("aclrtMemcpyAsync", RT_PARAM_INVALID, error);
        }
    }

    /// Whether an enqueued copy reads or writes some bytes.
    pub(super) fn is_copied(&self, at: u64, bytes: u64) -> bool {
        let within = |place: u64| (at..at + bytes).contains(&place);
        let mut work = self.objects.streams.values().flat_map(|stream| &stream.queue);
        work.any(|work| matches!(work, Work::Copy { to, from, .. } if within(*to) || within(*from)))
    }

    /// Whether a stream holds a wait for an event.
    fn is_waited_for(&self, event: u64) -> bool {
        let mut work = self.objects.streams.values().flat_map(|stream| &stream.queue);
        work.any(|work| matches!(work, Work::Wait { event: waited, .. } if *waited == event))
    }

    /// Where an event was recorded.
    fn recorded(&mut self, call: &'static str, event: *mut c_void) -> Result<(u32, Place), Code> {
        match self.objects.events.get(&(event as u64)) {
            Some(&(device, Some(place))) => Ok((device, place)),
            Some((_, None)) => Err(self.refuse(call, RT_PARAM_INVALID, "the event was not recorded")),
            None => Err(self.refuse(call, RT_INVALID_HANDLE, "no such event")),
        }
    }

    /// Whether an event has come, after some turns of the machine.
    fn look(&mut self, call: &'static str, event: *mut c_void) -> Result<bool, Code> {
        let (device, place) = self.recorded(call, event)?;
        self.go_on();
        let launches = self.objects.launches[device as usize];
        let stream = self.objects.streams.get(&place.stream);
        let last = stream.map_or(0, |stream| stream.last_before(place.work, launches));
        let stops = stream.is_some_and(|stream| stream.stops);
        let come = match self.machine.run_until(TURNS_A_LOOK, device, last) {
            Ok(come) => come,
            Err(error) => {
                self.fault.get_or_insert_with(|| error.to_string());
                return if stops { Err(RT_VECTOR_CORE_EXCEPTION) } else { Ok(true) };
            }
        };
        self.go_on();
        if !come && self.has_heartbeat && self.machine.has_crashed(device) == Ok(true) {
            return Err(RT_LOST_HEARTBEAT);
        }
        Ok(come && self.has_come(place))
    }
}

pub(super) unsafe extern "C" fn create_stream(stream: *mut *mut c_void) -> Code {
    const CALL: &str = "aclrtCreateStream";
    answer(CALL, |host| {
        let device = match host.device(CALL) {
            Ok(device) => device,
            Err(code) => return code,
        };
        let handle = host.objects.handle();
        host.objects.streams.insert(handle, Stream { device, stops: false, ended: 0, launched: 0, queue: [].into() });
        // SAFETY: the caller gives a place for it.
        unsafe { give(host, CALL, stream, handle as *mut c_void) }
    })
}

pub(super) extern "C" fn set_failure_mode(stream: *mut c_void, mode: u64) -> Code {
    const CALL: &str = "aclrtSetStreamFailureMode";
    answer(CALL, |host| {
        if let Err(code) = host.stream(CALL, stream) {
            return code;
        }
        match host.objects.streams.get_mut(&(stream as u64)) {
            Some(stream) if mode == STOP_ON_FAILURE && !stream.stops => {
                stream.stops = true;
                SUCCESS
            }
            _ => host.refuse(CALL, RT_PARAM_INVALID, format_args!("mode {mode}, or said before")),
        }
    })
}

pub(super) extern "C" fn destroy_stream(stream: *mut c_void) -> Code {
    const CALL: &str = "aclrtDestroyStream";
    answer(CALL, |host| {
        let device = match host.stream(CALL, stream) {
            Ok(device) => device,
            Err(code) => return code,
        };
        host.go_on();
        let is_idle = host.objects.streams.get(&(stream as u64)).is_none_or(|stream| stream.queue.is_empty());
        if !is_idle && !host.machine.has_crashed(device).unwrap_or(true) {
            return host.refuse(CALL, RT_PARAM_INVALID, "work of the stream is under way");
        }
        host.objects.streams.remove(&(stream as u64));
        SUCCESS
    })
}

pub(super) unsafe extern "C" fn create_event(event: *mut *mut c_void) -> Code {
    const CALL: &str = "aclrtCreateEvent";
    answer(CALL, |host| {
        let device = match host.device(CALL) {
            Ok(device) => device,
            Err(code) => return code,
        };
        let handle = host.objects.handle();
        host.objects.events.insert(handle, (device, None));
        // SAFETY: the caller gives a place for it.
        unsafe { give(host, CALL, event, handle as *mut c_void) }
    })
}

pub(super) extern "C" fn destroy_event(event: *mut c_void) -> Code {
    const CALL: &str = "aclrtDestroyEvent";
    answer(CALL, |host| {
        if host.is_waited_for(event as u64) {
            return host.refuse(CALL, RT_PARAM_INVALID, "a stream waits for the event");
        }
        match host.objects.events.remove(&(event as u64)) {
            Some(_) => SUCCESS,
            None => host.refuse(CALL, RT_INVALID_HANDLE, "no such event"),
        }
    })
}

pub(super) extern "C" fn record_event(event: *mut c_void, stream: *mut c_void) -> Code {
    const CALL: &str = "aclrtRecordEvent";
    answer(CALL, |host| {
        let device = match host.stream(CALL, stream) {
            Ok(device) => device,
            Err(code) => return code,
        };
        let work = host.objects.streams.get(&(stream as u64)).map_or(0, Stream::end);
        match host.objects.events.get_mut(&(event as u64)) {
            Some((of, place)) if *of == device => *place = Some(Place { stream: stream as u64, work }),
            _ => return host.refuse(CALL, RT_INVALID_HANDLE, "no such event of the device"),
        }
        SUCCESS
    })
}

pub(super) extern "C" fn wait_event(stream: *mut c_void, event: *mut c_void) -> Code {
    const CALL: &str = "aclrtStreamWaitEvent";
    answer(CALL, |host| {
        code((|| {
            let device = host.stream(CALL, stream)?;
            let (of, place) = host.recorded(CALL, event)?;
            if of != device {
                let what = format_args!("an event of device {of}, the stream's is {device}");
                return Err(host.refuse(CALL, RT_PARAM_INVALID, what));
            }
            host.enqueue(stream, Work::Wait { event: event as u64, place })
        })())
    })
}

pub(super) unsafe extern "C" fn query_event(event: *mut c_void, status: *mut i32) -> Code {
    const CALL: &str = "aclrtQueryEventStatus";
    answer(CALL, |host| match host.look(CALL, event) {
        // SAFETY: the caller gives a place for it.
        Ok(come) => unsafe { give(host, CALL, status, if come { EVENT_COMPLETE } else { 0 }) },
        Err(code) => code,
    })
}

pub(super) extern "C" fn memcpy_in_order(
    to: *mut c_void,
    room: usize,
    from: *const c_void,
    bytes: usize,
    kind: i32,
    stream: *mut c_void,
) -> Code {
    const CALL: &str = "aclrtMemcpyAsync";
    answer(CALL, |host| {
        code((|| {
            host.stream(CALL, stream)?;
            if bytes > room || bytes == 0 || kind != DEVICE_TO_DEVICE {
                let what = format_args!("{bytes} bytes to room for {room}, kind {kind}");
                return Err(host.refuse(CALL, RT_PARAM_INVALID, what));
            }
            host.block(CALL, to, bytes)?;
            host.block(CALL, from, bytes)?;
            let late = host.objects.lateness();
            host.enqueue(stream, Work::Copy { to: to as u64, from: from as u64, bytes: bytes as u64, late })
        })())
    })
}
