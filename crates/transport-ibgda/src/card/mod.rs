//! An adapter, as DEVX has it: each object ends when it is dropped, and holds what it is made of.

mod capabilities;
mod context;
mod domain;
mod port;
mod queue;
mod register;
mod storage;

pub(crate) use capabilities::Capabilities;
pub(crate) use context::Context;
use context::Object;
pub(crate) use domain::Domain;
pub(crate) use port::{Chosen, choose};
pub(crate) use queue::{PLACE, Place, Queue, State};
pub(crate) use register::Register;
pub(crate) use storage::Storage;
