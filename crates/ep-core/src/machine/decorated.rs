//! A machine whose ports are wrapped, so that any engine runs over counted, traced or faulty ports.

use super::{Bootstrap, Capabilities, Machine, Opening};
use crate::layout::Layout;
use crate::port::{Nanos, Port, Scope};
use crate::topology::Rank;

/// Wraps the ports of a machine as they are opened.
///
/// [`super::Counts`], [`super::Tracer`] and [`super::FaultPlan`] do.
pub trait Decorate {
    /// The wrapped port.
    type Port<P: Port>: Port;

    /// Wraps `port`, which rank `rank` opened as `opening` says.
    fn decorate<P: Port>(&self, port: P, rank: Rank, opening: &Opening) -> Self::Port<P>;
}

/// A machine with all its ports wrapped by a [`Decorate`]. Decorators stack: `Decorated<Decorated<M, Faults>, Counts>`
/// counts what reaches the faults.
#[derive(Debug)]
pub struct Decorated<M, D> {
    machine: M,
    decorator: D,
}

impl<M: Machine, D: Decorate> Decorated<M, D> {
    /// `machine` with ports wrapped by `decorator`.
    pub const fn new(machine: M, decorator: D) -> Self {
        Self { machine, decorator }
    }
}

impl<M: Machine, D: Decorate> Machine for Decorated<M, D> {
    type Port = D::Port<M::Port>;
    type Window = M::Window;

    fn rank(&self) -> Rank {
        self.machine.rank()
    }

    fn layout(&self) -> &Layout {
        self.machine.layout()
    }

    fn capabilities(&self) -> Capabilities {
        self.machine.capabilities()
    }

    fn now(&self) -> Nanos {
        self.machine.now()
    }

    fn port(&self, opening: Opening) -> Self::Port {
        self.decorator.decorate(self.machine.port(opening), self.machine.rank(), &opening)
    }

    fn window(&self) -> Self::Window {
        self.machine.window()
    }

    async fn reset(&self, scope: Scope) {
        self.machine.reset(scope).await;
    }

    fn bootstrap(&self) -> &dyn Bootstrap {
        self.machine.bootstrap()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;
    use crate::error::Fault;
    use crate::machine::loopback::{LoopbackMachine, PROBE, PROBE_LANE, finish, opening};
    use crate::machine::{Counts, FaultPlan, Tracer, Trigger, Trouble, VerbKind};
    use crate::trace::{Record, Verb};

    #[test]
    fn decorators_stack_on_a_machine_and_outlive_its_ports() {
        let counts = Counts::new();
        let records = Rc::new(RefCell::new(Vec::<Record>::new()));
        let fault = Fault::PeerGone { peer: Rank(0), phase: crate::Phase::Probe };
        let faults = FaultPlan::new().with(Trigger::kind(VerbKind::Publish), 2, Trouble::Fail(fault));
        let machine = Decorated::new(LoopbackMachine::new(), faults);
        let machine = Decorated::new(machine, counts.clone());
        let machine = Decorated::new(machine, Tracer::new(records.clone()));

        let mut first = machine.port(opening());
        assert_eq!(finish(first.publish(PROBE_LANE, PROBE, 1)), Ok(()));
        drop(first);
        let mut second = machine.port(opening());
        assert_eq!(finish(second.publish(PROBE_LANE, PROBE, 2)), Err(fault), "the plan counts over all ports");
        drop(second);

        assert_eq!(counts.verbs(VerbKind::Publish), 1);
        let verbs: Vec<_> = records.borrow().iter().map(|record| record.verb).collect();
        let published = Verb::Publish { lane: PROBE_LANE, cell: PROBE, value: 1 };
        assert_eq!(verbs, [Verb::Open, published, Verb::Close, Verb::Open, Verb::Close]);
    }
}
