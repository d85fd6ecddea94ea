//! What goes wrong under verbs: a proxy that stalls or dies, a network that is late, lanes that are lost or cut, commands that are none. All waits end, by name.

use super::*;

/// F6: a proxy that takes nothing ends verbs by their deadline, by name; once it goes on, so do they.
#[test]
fn a_proxy_that_stalls_is_named_at_the_deadline() {
    let Some(device) = Device::usual() else { return };
    let pair = Pair::new(network(), 1);
    let ([lane, _], at) = (pair.posters(device), pair.ends[0].arena().0);
    let began = Instant::now();
    let stall = pair.ends[0].lanes.shared.between_turns();
    let put = |time| lane.put([at, at, 8], time);
    let tickets = [put(LONG), put(LONG)].map(Result::unwrap);
    assert_eq!(put(SHORT), Err(FarStatus::Stalled), "no credit");
    assert_eq!(lane.flush(tickets[1], SHORT), FarStatus::Stalled);
    assert!(began.elapsed() >= SHORT * 2);
    drop(stall);
    let ticket = put(LONG).unwrap();
    assert_eq!(lane.flush(ticket, LONG), FarStatus::Ok);
}

/// Whoever posts gives signs of life as long as it goes on, also where nothing is posted, or a lane is full; and none while it stands still.
#[test]
fn a_proxy_gives_signs_of_life_unless_it_stands_still() {
    let Some(device) = Device::usual() else { return };
    let network = network();
    let pair = Pair::new(network.clone(), 3);
    let ([lane, _], lookout, at) = (pair.posters(device), pair.ends[0].lookout(device), pair.ends[0].arena().0);
    let goes_on = || {
        let (began, before) = (Instant::now(), lookout.pulse());
        while lookout.pulse() == before && began.elapsed() < LONG {}
        lookout.pulse() != before
    };
    assert!(goes_on(), "nothing is posted");
    network.delay(A, B, Duration::from_secs(20)).unwrap();
    while lane.put([at, at, 8], SHORT).is_ok() {}
    assert!(goes_on(), "a lane is full");
    let stall = pair.ends[0].lanes.shared.between_turns();
    let still = lookout.pulse();
    thread::sleep(SHORT);
    assert_eq!(lookout.pulse(), still);
    drop(stall);
    assert!(goes_on(), "it goes on");
}

/// F6: where the network does not get on, another name.
#[test]
fn a_network_that_is_late_is_no_stalled_proxy() {
    let Some(device) = Device::usual() else { return };
    let network = network();
    let pair = Pair::new(network.clone(), 3);
    network.delay(A, B, Duration::from_secs(20)).unwrap();
    let ([lane, _], at) = (pair.posters(device), pair.ends[0].arena().0);
    let ticket = lane.put([at, at, 8], LONG).unwrap();
    let taken = || lane.flush(ticket, SHORT);
    let began = Instant::now();
    while taken() == FarStatus::Stalled && began.elapsed() < LONG {}
    assert_eq!(taken(), FarStatus::Timeout);
}

/// F7: verbs on a lost lane end without their deadline, those the other way go on, and the host has the reason.
#[test]
fn a_lost_lane_ends_verbs_and_recovers_by_a_new_connection() {
    let Some(device) = Device::usual() else { return };
    let network = network().answer_timeout(Duration::from_millis(5)).unwrap();
    let mut pair = Pair::new(network.clone(), 2);
    network.lose(A, B);
    let ([lane, back], [_, head], at) = (pair.posters(device), pair.ends[0].cells(), pair.ends[0].arena().0);
    let began = Instant::now();
    let ticket = lane.put([at, at, 8], LONG).unwrap();
    assert_eq!(lane.flush(ticket, LONG), FarStatus::Broken);
    // No credit: that is for the traffic below.
    assert_eq!(back.publish(head.0, 0, LONG), FarStatus::Ok);
    assert_eq!(back.poll(), FarStatus::Ok);
    assert!(began.elapsed() < LONG / 2, "not by its deadline");
    // A device that does not look is not kept: its commands are taken, and go nowhere.
    for _ in 0..20 {
        match lane.put([at, at, 8], LONG) {
            Ok(_) | Err(FarStatus::Broken) => (),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(
        pair.ends[0].lanes.broken(B),
        Some(Fault::LaneBroken { lane: pair.ends[0].rows(), cause: LaneCause::NoAnswer })
    );
    assert_eq!(pair.ends[1].lanes.broken(A), None);
    network.mend(A, B);
    pair.meet();
    assert_eq!(traffic(TRAFFIC, &pair, device), "");
}

/// F7: a device that posts nothing finds out, too, where the host probes for it.
#[test]
fn a_lost_lane_on_which_nothing_is_posted_is_found_by_a_probe() {
    let Some(device) = Device::usual() else { return };
    let network = network().answer_timeout(Duration::from_millis(5)).unwrap();
    let mut pair = Pair::new(network.clone(), 2);
    network.lose(A, B);
    let [lane, _] = pair.posters(device);
    let began = Instant::now();
    while lane.poll() == FarStatus::Ok && began.elapsed() < LONG {
        pair.ends[0].lanes.probe(B);
        thread::yield_now();
    }
    assert_eq!(lane.poll(), FarStatus::Broken);
    let why = pair.ends[0].lanes.broken(B);
    assert!(matches!(why, Some(Fault::LaneBroken { cause: LaneCause::NoAnswer, .. })), "{why:?}");
}

/// A rank that has connected waits for one that has not, for longer than a silence may last: no probe breaks the lanes of the healthy peer. That one has posted before,
/// on connections of an earlier agreement. Once something was posted on the new ones, a silence is probed as ever.
#[test]
fn no_probe_goes_to_a_peer_that_has_not_connected_yet() {
    let Some(device) = Device::usual() else { return };
    let network = network().answer_timeout(Duration::from_millis(5)).unwrap();
    let mut pair = Pair::new(network.clone(), 2);
    for end in &pair.ends {
        end.lanes.shared.between_turns().silence.longest = Duration::from_millis(2);
    }
    assert_eq!(traffic(Traffic { messages: 3, ..TRAFFIC }, &pair, device), "");
    let offers: Vec<_> = pair.ends.iter_mut().map(|end| Some(end.lanes.offer().unwrap())).collect();
    pair.ends[0].lanes.connect(&offers).unwrap();
    thread::sleep(SHORT);
    assert_eq!(pair.ends[0].lanes.broken(B), None);
    pair.ends[1].lanes.connect(&offers).unwrap();
    let ([lane, _], at) = (pair.posters(device), pair.ends[0].arena().0);
    let ticket = lane.put([at, at, 8], LONG).unwrap();
    assert_eq!(lane.flush(ticket, LONG), FarStatus::Ok);
    network.lose(A, B);
    let began = Instant::now();
    while lane.poll() == FarStatus::Ok && began.elapsed() < LONG {
        thread::yield_now();
    }
    assert_eq!(lane.poll(), FarStatus::Broken);
}

/// F8: what reaches out of the window touches nothing and is named; so is what is no cell.
#[test]
fn commands_that_reach_out_of_the_window_break_their_lane() {
    let Some(device) = Device::usual() else { return };
    let bytes = |pair: &Pair<Loop>| pair.ends[0].layout.window_bytes();
    let pair = Pair::new(network(), 2);
    let ([lane, _], at) = (pair.posters(device), pair.ends[0].arena().0);
    let ticket = lane.put([bytes(&pair) - 4, at, 8], LONG).unwrap();
    assert_eq!(lane.flush(ticket, LONG), FarStatus::Refused);
    assert!(matches!(pair.ends[0].lanes.broken(B), Some(Fault::OutOfRange { .. })));
    let pair = Pair::new(network(), 2);
    let ([lane, _], at) = (pair.posters(device), pair.ends[0].arena().0);
    assert_eq!(lane.publish(at, 1, LONG), FarStatus::Ok);
    let began = Instant::now();
    while lane.poll() == FarStatus::Ok && began.elapsed() < LONG {
        thread::yield_now();
    }
    assert_eq!(lane.poll(), FarStatus::Refused);
    assert!(matches!(pair.ends[0].lanes.broken(B), Some(Fault::NotOffered { .. })));
}

/// A transport whose lanes panic once they are told to.
#[derive(Clone, Debug)]
struct Dying(Loop, &'static AtomicBool);

#[derive(Debug)]
struct DyingLanes(LoopLanes, &'static AtomicBool);

impl Transport for Dying {
    type Lanes = DyingLanes;

    fn far_lanes(&self) -> Queues {
        self.0.far_lanes()
    }

    fn open(&self, place: Place<'_>) -> Result<DyingLanes, Error> {
        Ok(DyingLanes(self.0.open(place)?, self.1))
    }
}

impl Lanes for DyingLanes {
    fn offer(&mut self) -> Result<Vec<u8>, Error> {
        self.0.offer()
    }

    fn connect(&mut self, offers: &[Option<Vec<u8>>]) -> Result<(), Error> {
        self.0.connect(offers)
    }

    fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Option<Ticket>, Fault> {
        assert!(!self.1.load(Ordering::Relaxed), "the thread dies, as the test wants it");
        self.0.put(lane, from, to)
    }

    fn raise(&mut self, lane: LaneId, at: Offset, bits: u64) -> Result<bool, Fault> {
        self.0.raise(lane, at, bits)
    }

    fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<bool, Fault> {
        self.0.flush(lane, upto)
    }

    fn progress(&mut self) {
        self.0.progress();
    }

    fn broken(&self, peer: Rank) -> Option<Fault> {
        self.0.broken(peer)
    }

    fn drain(&mut self, scope: Scope) -> bool {
        self.0.drain(scope)
    }

    fn cut(&mut self, scope: Scope) {
        self.0.cut(scope);
    }
}

/// F6, F7: verbs of a device whose proxy has died end at once, by name, and so does what the host does with it.
#[test]
fn a_proxy_that_dies_ends_verbs_by_name() {
    static DIE: AtomicBool = AtomicBool::new(false);
    let Some(device) = Device::usual() else { return };
    let mut pair = Pair::new(Dying(network(), &DIE), 2);
    let ([lane, _], at) = (pair.posters(device), pair.ends[0].arena().0);
    let put = || lane.put([at, at, 8], LONG);
    let ticket = put().unwrap();
    assert_eq!(lane.flush(ticket, LONG), FarStatus::Ok);
    DIE.store(true, Ordering::Relaxed);
    let began = Instant::now();
    let ticket = put().unwrap();
    assert_eq!(lane.flush(ticket, LONG), FarStatus::Gone);
    let ended = (0..8).find_map(|_| put().err());
    assert_eq!(ended, Some(FarStatus::Gone), "no credit any more");
    assert!(began.elapsed() < LONG / 2, "not by its deadline");
    assert!(matches!(pair.ends[0].lanes.broken(B), Some(Fault::LaneBroken { cause: LaneCause::NoPoster, .. })));
    assert!(pair.ends[0].lanes.drain(Scope::All), "what nobody posts is not under way");
    let refusal = pair.ends[0].lanes.offer().unwrap_err().to_string();
    assert!(refusal.contains("the proxy of rank 0 failed: its thread has ended"), "{refusal}");
}

/// What is under way when a lane is cut never arrives, and the device is told.
#[test]
fn a_cut_lane_ends_verbs() {
    let Some(device) = Device::usual() else { return };
    let network = network().latency(Duration::from_secs(20)).unwrap();
    let mut pair = Pair::new(network, 2);
    let ([lane, _], at) = (pair.posters(device), pair.ends[0].arena().0);
    let ticket = lane.put([at, at, 8], LONG).unwrap();
    let began = Instant::now();
    while began.elapsed() < LONG && !pair.ends[0].lanes.drain(Scope::All) {
        pair.ends[0].lanes.cut(Scope::Peer(B));
    }
    assert_eq!(lane.flush(ticket, LONG), FarStatus::Broken);
    assert_eq!(
        pair.ends[0].lanes.broken(B),
        Some(Fault::LaneBroken { lane: pair.ends[0].rows(), cause: LaneCause::Cut })
    );
}
