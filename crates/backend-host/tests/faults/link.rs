//! The guest's pair of interfaces, on which packets can be lost, delayed, or all of them swallowed.
//!
//! The disturbance is the kernel's netem, told by netlink, as `tc` tells it: starting a program takes longer on a busy emulated
//! machine than some blackholes are to last.

use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};

/// The interfaces under the two devices.
const ENDS: [&str; 2] = ["v0", "v1"];

/// What happens to each packet that an end sends.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Disturbance {
    /// It is lost with this probability.
    pub(crate) loss: f64,
    /// It comes so much later.
    pub(crate) delay: Duration,
}

impl Disturbance {
    pub(crate) const NONE: Self = Self::loss(0.0);
    pub(crate) const BLACKHOLE: Self = Self::loss(1.0);

    pub(crate) const fn loss(loss: f64) -> Self {
        Self { loss, delay: Duration::ZERO }
    }

    pub(crate) const fn delay(delay: Duration) -> Self {
        Self { loss: 0.0, delay }
    }
}

/// A disturbance of both ends, until this is dropped.
pub(crate) struct Link(Kernel);

impl Link {
    pub(crate) fn disturb(how: Disturbance) -> Self {
        let link = Self(Kernel::new());
        link.0.tell(Request::Add, how);
        link
    }

    /// Another disturbance in its place. What was counted stays.
    pub(crate) fn change(&self, how: Disturbance) {
        self.0.tell(Request::Change, how);
    }

    /// Loses all packets for `hole`. How long it was at both ends at once, at least, and at either, at most.
    pub(crate) fn swallow(&self, hole: Duration) -> (Duration, Duration) {
        let dig = || {
            // Ranks keep all cores busy, and the blackhole is to end when it should.
            rustix::process::setpriority_process(None, -20).expect("the guest's user is root");
            let before = Instant::now();
            self.change(Disturbance::BLACKHOLE);
            let begun = Instant::now();
            thread::sleep(hole);
            let least = begun.elapsed();
            self.change(Disturbance::NONE);
            (least, before.elapsed())
        };
        thread::scope(|scope| scope.spawn(dig).join()).expect("the link is disturbed")
    }

    /// Packets that were lost at both ends so far.
    pub(crate) fn lost(&self) -> u64 {
        ENDS.iter().map(|end| lost_at(end)).sum()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.0.tell(Request::Delete, Disturbance::NONE);
    }
}

/// What is to become of the queueing discipline of an end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Request {
    Add,
    Change,
    Delete,
}

/// A netlink socket, and the ends' numbers.
struct Kernel {
    socket: OwnedFd,
    ends: [i32; 2],
}

impl Kernel {
    fn new() -> Self {
        // Protocol 0 is NETLINK_ROUTE.
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None);
        let number = |end| {
            let path = format!("/sys/class/net/{end}/ifindex");
            let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
            text.trim().parse().expect("a number")
        };
        Self { socket: socket.expect("a netlink socket"), ends: ENDS.map(number) }
    }

    /// Returns when the kernel has done so at both ends.
    fn tell(&self, request: Request, how: Disturbance) {
        for end in self.ends {
            let kernel = SocketAddrNetlink::new(0, 0);
            sendto(&self.socket, &message(request, end, how), SendFlags::empty(), &kernel).expect("netlink");
            let mut answer = [0; 256];
            let (_, bytes) = recv(&self.socket, &mut answer, RecvFlags::empty()).expect("netlink");
            // Its header, then the error: none is 0.
            let said = &answer[..bytes];
            let error = said.get(16..20).map(|error| i32::from_ne_bytes(error.try_into().expect("four bytes")));
            assert_eq!(error, Some(0), "netlink on {request:?} of {how:?} at interface {end}: {said:?}");
        }
    }
}

/// The netlink message (`rtnetlink(7)`, linux/pkt_sched.h): a header, a `tcmsg`, and netem with its `tc_netem_qopt`.
fn message(request: Request, interface: i32, how: Disturbance) -> Vec<u8> {
    const NEW: u16 = 36;
    const DELETE: u16 = 37;
    /// To be answered by an acknowledgement.
    const ASKED: u16 = 1 | 4;
    const CREATE_ONLY: u16 = 0x400 | 0x200;
    const ROOT: u32 = u32::MAX;
    const KIND: u16 = 1;
    const OPTIONS: u16 = 2;
    /// Packets that netem holds.
    const LIMIT: u32 = 1000;
    /// Nanoseconds of a tick of the scheduler, as in /proc/net/psched.
    const TICK: u32 = 64;

    let (kind, flags) = match request {
        Request::Add => (NEW, ASKED | CREATE_ONLY),
        Request::Change => (NEW, ASKED),
        Request::Delete => (DELETE, ASKED),
    };
    // Of an attribute: its length, this word included, and its kind.
    let attribute = |kind: u16, bytes: u32| (4 + bytes) | (u32::from(kind) << 16);
    let mut body = Vec::new();
    let mut words = |words: &[u32]| words.iter().for_each(|word| body.extend(word.to_ne_bytes()));
    words(&[0, interface as u32, 0, ROOT, 0]);
    if request != Request::Delete {
        let delay = u32::try_from(how.delay.as_nanos()).expect("a short delay") / TICK;
        // All of them when it is the highest number.
        let loss = (how.loss * f64::from(u32::MAX)) as u32;
        words(&[attribute(KIND, 6)]);
        body.write_all(b"netem\0\0\0").expect("to memory");
        let mut words = |words: &[u32]| words.iter().for_each(|word| body.extend(word.to_ne_bytes()));
        words(&[attribute(OPTIONS, 24), delay, LIMIT, loss, 0, 0, 0]);
    }
    let mut message = Vec::new();
    message.extend((16 + body.len() as u32).to_ne_bytes());
    [kind, flags].iter().for_each(|half| message.extend(half.to_ne_bytes()));
    // Sequence number and sender: nobody looks at them.
    message.extend([0; 8]);
    message.extend(body);
    message
}

fn lost_at(end: &str) -> u64 {
    let shown = Command::new("tc").args(["-s", "qdisc", "show", "dev", end]).output().expect("tc starts");
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    let number = text.split_once("(dropped ").and_then(|(_, rest)| rest.split(',').next()?.parse().ok());
    number.unwrap_or_else(|| panic!("tc says nothing of lost packets: {text}"))
}
