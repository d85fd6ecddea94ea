//! Protection domains, and what is asked about them.

use std::ptr;

use ep_rdma::sys::AddressHandle;

use super::Context;
use crate::error::Error;
use crate::sys;

/// A protection domain, with the number that commands name it by.
#[derive(Clone, Debug)]
pub(crate) struct Domain {
    context: Context,
    verbs: ep_rdma::Domain,
    number: u32,
}

impl Domain {
    pub(crate) fn new(context: &Context) -> Result<Self, Error> {
        let verbs = ep_rdma::Domain::new(context)?;
        let mut told = sys::PdNumber::default();
        let part = sys::ObjPart { of: verbs.raw().cast(), out: ptr::from_mut(&mut told).cast() };
        let mut asked = sys::Obj { pd: part, ..sys::Obj::NONE };
        // SAFETY: a living domain, and a place for what is told of it.
        let code = unsafe { (context.functions().mlx5dv_init_obj)(&mut asked, sys::OBJ_PD) };
        context.outcome("mlx5dv_init_obj", code)?;
        Ok(Self { context: context.clone(), verbs, number: told.pdn })
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    /// As verbs have it.
    pub(crate) fn verbs(&self) -> &ep_rdma::Domain {
        &self.verbs
    }

    /// As commands name it.
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// The Ethernet address of a peer, which the system looks up.
    pub(super) fn ethernet_address(&self, attributes: &mut AddressHandle) -> Result<[u8; 6], Error> {
        let (context, functions) = (self.context(), self.context().functions());
        // SAFETY: a living domain, and whose address is wanted.
        let handle = unsafe { (functions.ibv_create_ah)(self.verbs.raw(), attributes) };
        let handle = context.made("ibv_create_ah", handle)?;
        let mut told = sys::Ah { av: ptr::null_mut(), comp_mask: 0 };
        let part = sys::ObjPart { of: handle.as_ptr().cast(), out: ptr::from_mut(&mut told).cast() };
        let mut asked = sys::Obj { ah: part, ..sys::Obj::NONE };
        // SAFETY: a living handle, and a place for what is told of it.
        let code = unsafe { (functions.mlx5dv_init_obj)(&mut asked, sys::OBJ_AH) };
        let address = context.outcome("mlx5dv_init_obj", code).and_then(|()| {
            let vector = context.made("mlx5dv_init_obj", told.av)?;
            // SAFETY: it lies in the handle, which lives.
            Ok(unsafe { vector.as_ref().rmac })
        });
        // SAFETY: made above, and used no more.
        unsafe { (functions.ibv_destroy_ah)(handle.as_ptr()) };
        Ok(address?)
    }
}
