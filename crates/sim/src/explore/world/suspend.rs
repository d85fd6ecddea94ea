//! Ranks that are suspended and go on when the others have given them up: zombies.

use ep_core::Rank;

use super::World;

/// The class of ports and ranks that do not run.
pub(super) const SUSPENDED: usize = 2;

/// Events that may pass between the agreement of the others and the moment at which a zombie goes on. Some rounds of the others
/// take as many.
const LATER: usize = 2000;

/// Where a rank is on its way to becoming a zombie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Suspension {
    /// Nothing is to happen to it, or it goes on.
    None,
    /// It is suspended after so many verbs.
    After(u64),
    /// It is suspended.
    On,
    /// It has been given up, and goes on at this event.
    Until(u64),
}

impl Suspension {
    /// Whether the rank does not run.
    pub(super) const fn is_on(self) -> bool {
        matches!(self, Self::On | Self::Until(_))
    }
}

impl World {
    /// Whether the rank, which begins a verb, is suspended, from now on perhaps.
    pub(super) fn suspends(&mut self, rank: Rank) -> bool {
        let state = &self.ranks[rank.index()];
        match state.suspension {
            Suspension::After(after) if state.verbs > after => self.suspend(rank),
            suspension => return suspension.is_on(),
        }
        true
    }

    /// What the rank has in flight stays there, on lanes that the adversary draws.
    fn suspend(&mut self, rank: Rank) {
        self.disturbed = true;
        let numbers: Vec<u32> = self.lanes.of(rank).collect();
        for number in numbers {
            self.lanes.lane_mut(number).frozen = self.adversary.below(2) == 0;
            self.lanes.update(number, self.now);
        }
        self.change(rank, Suspension::On);
    }

    /// The members have agreed to go on: those who are suspended and not among them will go on, too.
    pub(super) fn let_go_on(&mut self, members: &[Rank]) {
        for rank in self.layout.topology().all() {
            if self.ranks[rank.index()].suspension == Suspension::On && !members.contains(&rank) {
                let later = self.adversary.below(LATER) as u64;
                let event = self.events + later;
                self.change(rank, Suspension::Until(event));
                self.next_zombie = self.next_zombie.min(event);
            }
        }
    }

    /// Lets those go on whose time has come.
    pub(super) fn wake_zombies(&mut self) {
        if self.events < self.next_zombie {
            return;
        }
        self.next_zombie = u64::MAX;
        for rank in self.layout.topology().all() {
            match self.ranks[rank.index()].suspension {
                Suspension::Until(event) if event <= self.events => self.go_on(rank),
                Suspension::Until(event) => self.next_zombie = self.next_zombie.min(event),
                _ => {}
            }
        }
    }

    /// Nobody else has anything left to do. False when nobody is suspended.
    pub(super) fn let_all_go_on(&mut self) -> bool {
        let suspended: Vec<Rank> =
            self.layout.topology().all().filter(|rank| self.ranks[rank.index()].suspension.is_on()).collect();
        suspended.iter().for_each(|&rank| self.go_on(rank));
        !suspended.is_empty()
    }

    fn go_on(&mut self, rank: Rank) {
        self.change(rank, Suspension::None);
        let numbers: Vec<u32> = self.lanes.of(rank).collect();
        for number in numbers {
            self.lanes.lane_mut(number).frozen = false;
            self.lanes.update(number, self.now);
        }
        // Deadlines may have passed meanwhile.
        self.notify_where(|world, slot| slot.rank == rank && slot.deadline <= world.now);
    }

    /// Its ports that could run change the list with it.
    fn change(&mut self, rank: Rank, suspension: Suspension) {
        let ready: Vec<u32> =
            self.ready.iter().flatten().copied().filter(|&port| self.slots[port as usize].rank == rank).collect();
        ready.iter().for_each(|&port| self.unready(port));
        self.ranks[rank.index()].suspension = suspension;
        ready.iter().for_each(|&port| self.make_ready(port));
    }
}
