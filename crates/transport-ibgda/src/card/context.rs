//! Adapters: listing them, opening one for commands, and sending it one.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::command::{Message, any};
use crate::error::Error;
use crate::library::Library;
use crate::sys;

/// Bytes of an answer that tells no more than whether, and of what.
const ANSWER: usize = 0x10;

/// An adapter that takes commands.
#[derive(Clone, Debug)]
pub(crate) struct Context(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    library: Library,
    name: String,
    raw: NonNull<sys::Opaque>,
}

// SAFETY: libibverbs allows any thread to use a context, several at a time too.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: opened by `Context::open`, and everything made of it has ended: it held this.
        unsafe { self.library.ibv_close_device()(self.raw.as_ptr()) };
    }
}

/// The adapters of this machine, for as long as the list lives.
struct List<'a> {
    library: &'a Library,
    raw: NonNull<*mut sys::Opaque>,
    count: usize,
}

impl<'a> List<'a> {
    fn new(library: &'a Library) -> Result<Self, Error> {
        let mut count = 0;
        // SAFETY: the argument is a place for a number.
        let raw = unsafe { library.ibv_get_device_list()(&mut count) };
        match NonNull::new(raw) {
            Some(raw) => Ok(Self { library, raw, count: count.max(0) as usize }),
            // No module of the kernel: no devices.
            None if io::Error::last_os_error().raw_os_error() == Some(38) => {
                Err(Error::NoDevice { found: "the kernel has no RDMA: load ib_uverbs and mlx5_ib".into() })
            }
            None => Err(Error::call("ibv_get_device_list", "this machine", io::Error::last_os_error())),
        }
    }

    /// Their names, and whether each is of the kind that is driven here.
    fn all(&self) -> impl Iterator<Item = (String, NonNull<sys::Opaque>, bool)> + '_ {
        (0..self.count).filter_map(|at| {
            // SAFETY: the list has `count` entries, and lives.
            let device = NonNull::new(unsafe { *self.raw.as_ptr().add(at) })?;
            // SAFETY: of a device of a living list; the name is a string in it.
            let name = unsafe { CStr::from_ptr(self.library.ibv_get_device_name()(device.as_ptr())) };
            // SAFETY: of a device of a living list.
            let driven = unsafe { self.library.mlx5dv_is_supported()(device.as_ptr()) };
            Some((name.to_string_lossy().into_owned(), device, driven))
        })
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        // SAFETY: given out by `ibv_get_device_list`, and no device of it is used any more but opened ones, which count for
        // themselves.
        unsafe { self.library.ibv_free_device_list()(self.raw.as_ptr()) };
    }
}

impl Context {
    /// The names of all adapters of the kind.
    pub(crate) fn names(library: &Library) -> Result<Vec<String>, Error> {
        let (ours, others): (Vec<_>, Vec<_>) = List::new(library)?.all().partition(|&(_, _, driven)| driven);
        let names = |list: Vec<(String, _, _)>| list.into_iter().map(|(name, _, _)| name).collect::<Vec<_>>();
        if ours.is_empty() {
            let others = names(others);
            let found = if others.is_empty() { "no RDMA device".into() } else { others.join(", ") };
            return Err(Error::NoDevice { found });
        }
        Ok(names(ours))
    }

    /// Opens one for commands. Opened plainly it might take none, and say so only when it is too late.
    pub(crate) fn open(library: &Library, name: &str) -> Result<Self, Error> {
        let list = List::new(library)?;
        let found = list.all().find(|(found, _, driven)| *driven && found == name);
        let Some((_, device, _)) = found else {
            let found = list.all().filter(|&(_, _, driven)| driven).map(|(name, _, _)| name);
            return Err(Error::NoSuchDevice { name: name.to_owned(), found: found.collect::<Vec<_>>().join(", ") });
        };
        let mut attributes = sys::ContextAttr { flags: sys::CONTEXT_DEVX, comp_mask: 0 };
        // SAFETY: a device of a living list, and what is asked for.
        let raw = unsafe { library.mlx5dv_open_device()(device.as_ptr(), &mut attributes) };
        let why = || Error::NoDevx { device: name.to_owned(), why: io::Error::last_os_error().to_string() };
        let raw = NonNull::new(raw).ok_or_else(why)?;
        Ok(Self(Arc::new(Opened { library: library.clone(), name: name.to_owned(), raw })))
    }

    pub(crate) fn name(&self) -> &str {
        &self.0.name
    }

    pub(super) fn library(&self) -> &Library {
        &self.0.library
    }

    pub(super) fn raw(&self) -> *mut sys::Opaque {
        self.0.raw.as_ptr()
    }

    /// What a call answered that returns 0 or an error number.
    pub(super) fn outcome(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        let error = || if code < 0 { io::Error::last_os_error() } else { io::Error::from_raw_os_error(code) };
        if code == 0 { Ok(()) } else { Err(Error::call(call, self.name(), error())) }
    }

    pub(super) fn made<T>(&self, call: &'static str, raw: *mut T) -> Result<NonNull<T>, Error> {
        NonNull::new(raw).ok_or_else(|| Error::call(call, self.name(), io::Error::last_os_error()))
    }

    /// Sends a command that is about no object.
    pub(super) fn general(&self, command: &'static str, message: &Message, answer: usize) -> Result<Message, Error> {
        let mut answer = Message::answer(answer);
        let (bytes, room) = (message.bytes(), answer.bytes().len());
        let to = answer.bytes_mut().as_mut_ptr().cast::<c_void>();
        // SAFETY: both buffers live, and have so many bytes.
        let code = unsafe {
            self.library().mlx5dv_devx_general_cmd()(self.raw(), bytes.as_ptr().cast(), bytes.len(), to, room)
        };
        self.answered(command, code == 0, answer)
    }

    /// The queue of events that completion queues name; none of ours asks for any.
    pub(super) fn event_queue(&self) -> Result<u32, Error> {
        let mut number = 0;
        // SAFETY: an opened device and a place for a number.
        let code = unsafe { self.library().mlx5dv_devx_query_eqn()(self.raw(), 0, &mut number) };
        self.outcome("mlx5dv_devx_query_eqn", code).map(|()| number)
    }

    fn answered(&self, command: &'static str, done: bool, answer: Message) -> Result<Message, Error> {
        let status = answer.get(any::STATUS) as u8;
        if done && status == 0 {
            return Ok(answer);
        }
        let why = if done { "refused".into() } else { io::Error::last_os_error().to_string() };
        let (device, syndrome) = (self.name().to_owned(), answer.get(any::SYNDROME) as u32);
        Err(Error::Command { command, device, status, syndrome, why })
    }
}

/// What a command made. The kernel's driver destroys it with the command that is right for it.
#[derive(Debug)]
pub(crate) struct Object {
    context: Context,
    raw: NonNull<sys::Opaque>,
    number: u32,
}

// SAFETY: libmlx5 allows any thread to use an object.
unsafe impl Send for Object {}

impl Object {
    pub(super) fn new(context: &Context, command: &'static str, message: &Message) -> Result<Self, Error> {
        let mut answer = Message::answer(ANSWER);
        let (bytes, room) = (message.bytes(), answer.bytes().len());
        let to = answer.bytes_mut().as_mut_ptr().cast::<c_void>();
        // SAFETY: both buffers live, and have so many bytes.
        let raw = unsafe {
            context.library().mlx5dv_devx_obj_create()(context.raw(), bytes.as_ptr().cast(), bytes.len(), to, room)
        };
        let raw = NonNull::new(raw);
        let answer = context.answered(command, raw.is_some(), answer);
        match (raw, answer) {
            (Some(raw), Ok(answer)) => {
                Ok(Self { context: context.clone(), raw, number: answer.get(any::NUMBER) as u32 })
            }
            (_, Err(error)) => Err(error),
            (None, Ok(_)) => Err(Error::call(command, context.name(), io::Error::last_os_error())),
        }
    }

    /// The number that the adapter gave it.
    pub(crate) const fn number(&self) -> u32 {
        self.number
    }

    /// Changes it.
    pub(super) fn modify(&self, command: &'static str, message: &Message) -> Result<(), Error> {
        let mut answer = Message::answer(ANSWER);
        let (bytes, room) = (message.bytes(), answer.bytes().len());
        let to = answer.bytes_mut().as_mut_ptr().cast::<c_void>();
        let modify = self.context.library().mlx5dv_devx_obj_modify();
        // SAFETY: the object lives; both buffers do, and have so many bytes.
        let code = unsafe { modify(self.raw.as_ptr(), bytes.as_ptr().cast(), bytes.len(), to, room) };
        self.context.answered(command, code == 0, answer).map(drop)
    }

    /// Asks about it.
    pub(super) fn query(&self, command: &'static str, message: &Message, answer: usize) -> Result<Message, Error> {
        let mut answer = Message::answer(answer);
        let (bytes, room) = (message.bytes(), answer.bytes().len());
        let to = answer.bytes_mut().as_mut_ptr().cast::<c_void>();
        let query = self.context.library().mlx5dv_devx_obj_query();
        // SAFETY: the object lives; both buffers do, and have so many bytes.
        let code = unsafe { query(self.raw.as_ptr(), bytes.as_ptr().cast(), bytes.len(), to, room) };
        self.context.answered(command, code == 0, answer)
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: made by `Object::new`. From here on the adapter neither reads nor writes anything for it.
        unsafe { self.context.library().mlx5dv_devx_obj_destroy()(self.raw.as_ptr()) };
    }
}
