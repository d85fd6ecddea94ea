//! Ranks meet while strangers connect without pause, and while descriptors run out.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ep_core::Rank;
use socket2::{Domain, Socket, Type};

use super::reactor::HANDSHAKE;
use crate::secret::Secret;
use crate::wire::{MAGIC, Opening, VERSION, plain};
use crate::{Error, Member, Settings};

/// Long enough for a slow machine that is flooded.
const LONG: Duration = Duration::from_secs(20);
/// Each from an address of its own.
const FLOODERS: u8 = 4;
const RANKS: u32 = 4;

/// What a flooder does with a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Habit {
    /// Closes it at once.
    Drop,
    /// Keeps it until the meeting place closes it, and says nothing.
    Hold,
    /// Keeps it, and says what is no hello.
    Babble,
    /// Keeps it after a valid hello, which everybody may say.
    Greet,
}

/// Connections that make a flood.
const FLOOD: u64 = 500;

/// Connects from the address that ends with `last`.
fn connect(address: SocketAddr, last: u8) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from(([127, 0, 0, last], 0)).into())?;
    socket.connect_timeout(&address.into(), Duration::from_millis(100))?;
    Ok(socket.into())
}

/// Whether the other end has left `stream` open.
fn is_open(stream: &mut TcpStream) -> bool {
    let _ = stream.set_nonblocking(true);
    loop {
        match stream.read(&mut [0; 256]) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
        }
    }
}

/// Connects until it is told to stop, and counts how often it did.
fn flood(address: SocketAddr, last: u8, habit: Habit, stop: &AtomicBool, count: &AtomicU64) {
    /// Connections that a flooder keeps: two of them have more than the meeting place has room for.
    const KEPT: usize = 200;
    let hello = plain(&Opening::Hello { magic: MAGIC, version: VERSION, nonce: [7; 32] });
    let mut kept: Vec<TcpStream> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        if kept.len() >= KEPT {
            kept.retain_mut(is_open);
        }
        if kept.len() >= KEPT {
            thread::sleep(Duration::from_millis(1));
            continue;
        }
        let Ok(mut stream) = connect(address, last) else { continue };
        // A reset instead of a farewell: otherwise the system would soon run out of ports.
        let _ = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
        let _ = match habit {
            Habit::Drop | Habit::Hold => Ok(()),
            Habit::Babble => stream.write_all(&[b'x'; 40]),
            Habit::Greet => stream.write_all(&hello),
        };
        count.fetch_add(1, Ordering::Relaxed);
        if habit != Habit::Drop {
            kept.push(stream);
        }
    }
}

/// What each rank makes of joining at a flooded meeting place, and how often strangers connected.
fn meet_amid(habit: Habit) -> (Vec<Result<(), Error>>, u64) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let settings = |rank| {
        let secret = Some(Secret::from_text("flooded").unwrap());
        Settings::new(Rank(rank), RANKS, address.to_string()).secret(secret).within(LONG)
    };
    let (stop, strangers) = (&AtomicBool::new(false), &AtomicU64::new(0));
    let results = thread::scope(|scope| {
        for last in 0..FLOODERS {
            scope.spawn(move || flood(address, 2 + last, habit, stop, strangers));
        }
        let barrier = |member: Member| member.barrier(LONG);
        let host = settings(0);
        let host = scope.spawn(move || Member::host(listener, host).and_then(barrier));
        // The others come when the host has been flooded for a while.
        let began = Instant::now();
        while strangers.load(Ordering::Relaxed) <= FLOOD && began.elapsed() < LONG / 2 {
            thread::sleep(Duration::from_millis(1));
        }
        let others: Vec<_> = (1..RANKS)
            .map(|rank| {
                let settings = settings(rank);
                scope.spawn(move || Member::join(settings).and_then(barrier))
            })
            .collect();
        // Nobody leaves before all have been told.
        let results: Vec<_> = std::iter::once(host).chain(others).map(|thread| thread.join().unwrap()).collect();
        stop.store(true, Ordering::Relaxed);
        results
    });
    (results, strangers.load(Ordering::Relaxed))
}

#[test]
fn ranks_meet_while_strangers_connect_without_pause() {
    for habit in [Habit::Drop, Habit::Hold, Habit::Babble, Habit::Greet] {
        let began = Instant::now();
        let (results, strangers) = meet_amid(habit);
        let met = began.elapsed();
        println!("{habit:?}: {strangers} connections of strangers, met after {met:.1?}");
        assert!(results.iter().all(Result::is_ok), "{habit:?}: {results:#?}");
        assert!(strangers > FLOOD, "{habit:?}: {strangers} connections are no flood");
        // All places are taken then, and nobody's time has run out: a stranger has given way.
        assert!(!matches!(habit, Habit::Hold | Habit::Greet) || met < HANDSHAKE, "{habit:?}: met after {met:.1?}");
    }
}
