//! Any backend of the same endpoints. Cases are compiled once for all of them: a test program that runs the suite on threads, on processes and
//! over several networks would otherwise hold each case as often, and take that much longer to build.

use std::any::Any;
use std::pin::Pin;
use std::sync::Arc;

use ep_core::{Error, Layout, LowLatency};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::backend::{Backend, Requirement, Setup, Travels};
use crate::processes::{pack, unpack};
use crate::script::{Script, Seen};

/// What a rank's work gave, whatever that is.
enum Parcel {
    /// As it was given here; and how it is packed for another process.
    Here(Box<dyn Any + Send>, fn(&dyn Any) -> Result<Vec<u8>, String>),
    /// Of a process, packed.
    Packed(Vec<u8>),
}

impl Parcel {
    fn of<T: Travels>(value: T) -> Self {
        let packed = |value: &dyn Any| pack(value.downcast_ref::<T>().ok_or("a parcel of another type")?);
        Self::Here(Box::new(value), packed)
    }

    fn open<T: Travels>(self) -> Result<T, String> {
        match self {
            Self::Here(value, _) => value.downcast().map(|value| *value).map_err(|_| "a parcel of another type".into()),
            Self::Packed(bytes) => unpack(&bytes),
        }
    }
}

impl Serialize for Parcel {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Here(value, packed) => packed(&**value).map_err(serde::ser::Error::custom)?.serialize(serializer),
            Self::Packed(bytes) => bytes.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Parcel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::deserialize(deserializer).map(Self::Packed)
    }
}

/// A rank's work on an endpoint.
type Work<'a, E> = dyn Fn(E) -> Pin<Box<dyn Future<Output = Parcel> + 'a>> + Send + Sync + 'a;

/// What looks at what the ranks gave.
type Judge<'a> = Box<dyn FnOnce(Vec<Option<Parcel>>) -> Result<Parcel, String> + 'a>;

fn opened<T: Travels>(parcels: Vec<Option<Parcel>>) -> Result<Vec<Option<T>>, String> {
    parcels.into_iter().map(|parcel| parcel.map(Parcel::open).transpose()).collect()
}

/// A backend, as far as its endpoints are all that is known of it.
trait Ranks<E>: Send + Sync {
    fn absent(&self) -> Option<&'static str>;
    fn lacks(&self, what: Requirement) -> Option<&'static str>;
    fn makes_fp8(&self) -> bool;
    fn window(&self, layout: Layout) -> Result<Layout, Error>;
    fn campaign(&self) -> u32;
    fn seeds(&self, most: u64) -> u64;
    fn largest(&self) -> (u32, u32);
    fn persists(&self) -> bool;
    fn run(&self, setup: &Setup, work: &Work<'_, E>) -> Result<Vec<Option<Parcel>>, String>;
    fn run_judged(&self, setup: &Setup, work: &Work<'_, E>, judge: Judge<'_>) -> Result<Parcel, String>;
    fn probe(&self, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String>;
}

impl<B: Backend> Ranks<B::Endpoint> for B {
    fn absent(&self) -> Option<&'static str> {
        Backend::absent(self)
    }

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        Backend::lacks(self, what)
    }

    fn makes_fp8(&self) -> bool {
        Backend::makes_fp8(self)
    }

    fn window(&self, layout: Layout) -> Result<Layout, Error> {
        Backend::window(self, layout)
    }

    fn campaign(&self) -> u32 {
        Backend::campaign(self)
    }

    fn seeds(&self, most: u64) -> u64 {
        Backend::seeds(self, most)
    }

    fn largest(&self) -> (u32, u32) {
        Backend::largest(self)
    }

    fn persists(&self) -> bool {
        Backend::persists(self)
    }

    fn run(&self, setup: &Setup, work: &Work<'_, B::Endpoint>) -> Result<Vec<Option<Parcel>>, String> {
        Backend::run(self, setup, async |endpoint| work(endpoint).await)
    }

    fn run_judged(&self, setup: &Setup, work: &Work<'_, B::Endpoint>, judge: Judge<'_>) -> Result<Parcel, String> {
        Backend::run_judged(self, setup, async |endpoint| work(endpoint).await, judge)
    }

    fn probe(&self, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
        Backend::probe(self, setup, scripts)
    }
}

/// Any backend whose endpoints are `E`. Cheap to clone.
pub(crate) struct AnyOf<E>(Arc<dyn Ranks<E>>);

impl<E> AnyOf<E> {
    pub(crate) fn new(backend: impl Backend<Endpoint = E>) -> Self {
        Self(Arc::new(backend))
    }
}

impl<E> Clone for AnyOf<E> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<E: LowLatency + 'static> Backend for AnyOf<E> {
    type Endpoint = E;

    fn absent(&self) -> Option<&'static str> {
        self.0.absent()
    }

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        self.0.lacks(what)
    }

    fn makes_fp8(&self) -> bool {
        self.0.makes_fp8()
    }

    fn window(&self, layout: Layout) -> Result<Layout, Error> {
        self.0.window(layout)
    }

    fn campaign(&self) -> u32 {
        self.0.campaign()
    }

    fn seeds(&self, most: u64) -> u64 {
        self.0.seeds(most)
    }

    fn largest(&self) -> (u32, u32) {
        self.0.largest()
    }

    fn persists(&self) -> bool {
        self.0.persists()
    }

    fn run<T, F>(&self, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
    where
        T: Travels,
        F: AsyncFn(E) -> T + Send + Sync,
    {
        opened(self.0.run(setup, &parcelled(&user))?)
    }

    fn run_judged<T, F, V>(
        &self,
        setup: &Setup,
        user: F,
        judge: impl FnOnce(Vec<Option<T>>) -> Result<V, String>,
    ) -> Result<V, String>
    where
        T: Travels,
        F: AsyncFn(E) -> T + Send + Sync,
        V: Travels,
    {
        let judge = Box::new(|came| judge(opened(came)?).map(Parcel::of));
        self.0.run_judged(setup, &parcelled(&user), judge)?.open()
    }

    fn probe(&self, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
        self.0.probe(setup, scripts)
    }
}

/// `user`, whose results are put into parcels.
fn parcelled<'a, E: 'a, T: Travels, F>(user: &'a F) -> impl Fn(E) -> Pin<Box<dyn Future<Output = Parcel> + 'a>>
where
    F: AsyncFn(E) -> T,
{
    move |endpoint| Box::pin(async move { Parcel::of(user(endpoint).await) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_a_parcel_comes_out_of_it_here_and_after_a_journey() {
        let value = (7u32, vec![Some("seven".to_owned()), None]);
        let sent = pack(&Parcel::of(value.clone())).unwrap();
        let came: Parcel = unpack(&sent).unwrap();
        // Sent on, as a rank's process sends what it was told.
        let again: Parcel = unpack(&pack(&came).unwrap()).unwrap();
        for parcel in [Parcel::of(value.clone()), came, again] {
            assert_eq!(parcel.open::<(u32, Vec<Option<String>>)>().unwrap(), value);
        }
        assert!(Parcel::of(value).open::<u32>().is_err());
    }
}
