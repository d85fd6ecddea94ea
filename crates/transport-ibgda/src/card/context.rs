//! Adapters: listing them, opening one for commands, and sending it one.

use std::ffi::c_void;
use std::io;
use std::ops::Deref;
use std::ptr::NonNull;

use ep_rdma::{Device, Devices};

use crate::command::{Message, any};
use crate::error::Error;
use crate::library::{Functions, Library};
use crate::sys;

/// Bytes of an answer that tells no more than whether, and of what.
const ANSWER: usize = 0x10;

/// An adapter that takes commands, and the functions for it.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    library: Library,
    device: Device,
}

/// What a kernel without RDMA has.
fn no_kernel() -> Error {
    Error::NoDevice { found: "the kernel has no RDMA: load ib_uverbs and mlx5_ib".into() }
}

/// The names of these devices, as [`Devices::iter`] has them.
fn names<'a>(devices: impl Iterator<Item = &'a (String, NonNull<ep_rdma::sys::Device>)>) -> Vec<String> {
    devices.map(|(name, _)| name.clone()).collect()
}

/// Whether a device of a living list is of the kind that is driven here.
fn is_driven(library: &Library, device: NonNull<ep_rdma::sys::Device>) -> bool {
    // SAFETY: the caller's list lives.
    unsafe { (library.functions().mlx5dv_is_supported)(device.as_ptr()) }
}

impl Deref for Context {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

impl Context {
    /// The names of all adapters of the kind.
    pub(crate) fn names(library: &Library) -> Result<Vec<String>, Error> {
        let devices = Devices::of(library.verbs())?.ok_or_else(no_kernel)?;
        let (ours, others): (Vec<_>, Vec<_>) = devices.iter().partition(|&(_, device)| is_driven(library, device));
        if ours.is_empty() {
            let found = if others.is_empty() { "no RDMA device".into() } else { names(others.iter()).join(", ") };
            return Err(Error::NoDevice { found });
        }
        Ok(names(ours.iter()))
    }

    /// Opens one for commands. Opened plainly it might take none, and say so only when it is too late.
    pub(crate) fn open(library: &Library, name: &str) -> Result<Self, Error> {
        let devices = Devices::of(library.verbs())?.ok_or_else(no_kernel)?;
        let ours: Vec<_> = devices.iter().filter(|&(_, device)| is_driven(library, device)).collect();
        let Some((_, device)) = ours.iter().find(|(found, _)| found == name) else {
            return Err(Error::NoSuchDevice { name: name.to_owned(), found: names(ours.iter()).join(", ") });
        };
        let mut attributes = sys::ContextAttr { flags: sys::CONTEXT_DEVX, comp_mask: 0 };
        // SAFETY: a device of a living list, and what is asked for.
        let raw = unsafe { (library.functions().mlx5dv_open_device)(device.as_ptr(), &mut attributes) };
        let why = || Error::NoDevx { device: name.to_owned(), why: io::Error::last_os_error().to_string() };
        let raw = NonNull::new(raw).ok_or_else(why)?;
        // SAFETY: opened just now, by the libraries that have these functions.
        let device = unsafe { Device::new(library.verbs(), name, raw) };
        Ok(Self { library: library.clone(), device })
    }

    pub(super) fn functions(&self) -> &Functions {
        self.library.functions()
    }

    /// Sends a command that is about no object.
    pub(super) fn general(&self, command: &'static str, message: &Message, answer: usize) -> Result<Message, Error> {
        let mut answer = Message::answer(answer);
        let (bytes, room) = (message.bytes(), answer.bytes().len());
        let to = answer.bytes_mut().as_mut_ptr().cast::<c_void>();
        // SAFETY: both buffers live, and have so many bytes.
        let code = unsafe {
            (self.functions().mlx5dv_devx_general_cmd)(self.raw(), bytes.as_ptr().cast(), bytes.len(), to, room)
        };
        self.answered(command, code == 0, answer)
    }

    /// The queue of events that completion queues name; none of ours asks for any.
    pub(super) fn event_queue(&self) -> Result<u32, Error> {
        let mut number = 0;
        // SAFETY: an opened device and a place for a number.
        let code = unsafe { (self.functions().mlx5dv_devx_query_eqn)(self.raw(), 0, &mut number) };
        self.outcome("mlx5dv_devx_query_eqn", code)?;
        Ok(number)
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
            (context.functions().mlx5dv_devx_obj_create)(context.raw(), bytes.as_ptr().cast(), bytes.len(), to, room)
        };
        let raw = NonNull::new(raw);
        let answer = context.answered(command, raw.is_some(), answer);
        match (raw, answer) {
            (Some(raw), Ok(answer)) => {
                Ok(Self { context: context.clone(), raw, number: answer.get(any::NUMBER) as u32 })
            }
            (_, Err(error)) => Err(error),
            (None, Ok(_)) => Err(ep_rdma::Error::call(command, context.name(), io::Error::last_os_error()).into()),
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
        let modify = self.context.functions().mlx5dv_devx_obj_modify;
        // SAFETY: the object lives; both buffers do, and have so many bytes.
        let code = unsafe { modify(self.raw.as_ptr(), bytes.as_ptr().cast(), bytes.len(), to, room) };
        self.context.answered(command, code == 0, answer).map(drop)
    }

    /// Asks about it.
    pub(super) fn query(&self, command: &'static str, message: &Message, answer: usize) -> Result<Message, Error> {
        let mut answer = Message::answer(answer);
        let (bytes, room) = (message.bytes(), answer.bytes().len());
        let to = answer.bytes_mut().as_mut_ptr().cast::<c_void>();
        let query = self.context.functions().mlx5dv_devx_obj_query;
        // SAFETY: the object lives; both buffers do, and have so many bytes.
        let code = unsafe { query(self.raw.as_ptr(), bytes.as_ptr().cast(), bytes.len(), to, room) };
        self.context.answered(command, code == 0, answer)
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: made by `Object::new`. From here on the adapter neither reads nor writes anything for it.
        unsafe { (self.context.functions().mlx5dv_devx_obj_destroy)(self.raw.as_ptr()) };
    }
}
