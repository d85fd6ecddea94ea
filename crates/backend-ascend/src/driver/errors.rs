//! What can go wrong with an NPU or its libraries, by name.

/// `aclError`.
pub(crate) type Code = i32;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const INVALID_PARAM: Code = 100_000;
pub(crate) const UNINITIALIZED: Code = 100_001;
pub(crate) const REPEATED_INITIALIZE: Code = 100_002;
pub(crate) const RT_PARAM_INVALID: Code = 107_000;
pub(crate) const RT_INVALID_DEVICE: Code = 107_001;
pub(crate) const RT_CONTEXT_NULL: Code = 107_002;
pub(crate) const RT_STREAM_CONTEXT: Code = 107_003;
pub(crate) const RT_FILE_OPEN: Code = 107_009;
pub(crate) const RT_INVALID_HANDLE: Code = 107_017;
pub(crate) const RT_MEMORY_ALLOCATION: Code = 207_001;
pub(crate) const RT_MEMORY_FREE: Code = 207_002;
pub(crate) const RT_LOST_HEARTBEAT: Code = 507_010;
pub(crate) const RT_KERNEL_LOOKUP: Code = 507_027;
pub(crate) const RT_VECTOR_CORE_EXCEPTION: Code = 507_035;

/// Codes of `acl_base.h` and `rt_error_codes.h` that an endpoint may meet, and what their comments say.
const NAMES: [(Code, &str, &str); 32] = [
    (INVALID_PARAM, "ACL_ERROR_INVALID_PARAM", "a parameter is invalid"),
    (UNINITIALIZED, "ACL_ERROR_UNINITIALIZE", "aclInit was not called"),
    (REPEATED_INITIALIZE, "ACL_ERROR_REPEAT_INITIALIZE", "aclInit was called before"),
    (RT_PARAM_INVALID, "ACL_ERROR_RT_PARAM_INVALID", "a parameter is invalid"),
    (RT_INVALID_DEVICE, "ACL_ERROR_RT_INVALID_DEVICEID", "there is no such device"),
    (RT_CONTEXT_NULL, "ACL_ERROR_RT_CONTEXT_NULL", "the thread has no device"),
    (RT_STREAM_CONTEXT, "ACL_ERROR_RT_STREAM_CONTEXT", "the stream is of another device"),
    (107_008, "ACL_ERROR_RT_ADDR_UNALIGNED", "an address is not aligned"),
    (RT_FILE_OPEN, "ACL_ERROR_RT_FILE_OPEN", "the file cannot be opened"),
    (107_016, "ACL_ERROR_RT_INVALID_MEMORY_TYPE", "memory of the wrong type"),
    (RT_INVALID_HANDLE, "ACL_ERROR_RT_INVALID_HANDLE", "the handle is of nothing"),
    (107_019, "ACL_ERROR_RT_WAIT_TIMEOUT", "a wait took too long"),
    (107_020, "ACL_ERROR_RT_TASK_TIMEOUT", "a task took too long"),
    (107_022, "ACL_ERROR_RT_DEVICE_TASK_ABORT", "tasks of the device are aborted"),
    (207_000, "ACL_ERROR_RT_FEATURE_NOT_SUPPORT", "the device or driver lacks it"),
    (RT_MEMORY_ALLOCATION, "ACL_ERROR_RT_MEMORY_ALLOCATION", "the device has no such memory left"),
    (RT_MEMORY_FREE, "ACL_ERROR_RT_MEMORY_FREE", "the memory cannot be freed"),
    (207_004, "ACL_ERROR_RT_NO_DEVICE", "there is no device"),
    (207_005, "ACL_ERROR_RT_RESOURCE_ALLOC_FAIL", "a resource is used up"),
    (207_006, "ACL_ERROR_RT_NO_PERMISSION", "no permission"),
    (207_018, "ACL_ERROR_RT_DEVICE_OOM", "the device has no memory left"),
    (507_000, "ACL_ERROR_RT_INTERNAL_ERROR", "the runtime failed"),
    (RT_LOST_HEARTBEAT, "ACL_ERROR_RT_LOST_HEARTBEAT", "the device does not answer"),
    (507_014, "ACL_ERROR_RT_AICORE_TIMEOUT", "a core took too long"),
    (507_015, "ACL_ERROR_RT_AICORE_EXCEPTION", "a core stopped with an exception"),
    (507_018, "ACL_ERROR_RT_AICPU_EXCEPTION", "a CPU of the device stopped with an exception"),
    (507_022, "ACL_ERROR_RT_IPC_ERROR", "memory could not be shared between processes"),
    (RT_KERNEL_LOOKUP, "ACL_ERROR_RT_KERNEL_LOOKUP", "the binary has no such kernel"),
    (507_033, "ACL_ERROR_RT_DEV_SETUP_ERROR", "the device cannot be set up"),
    (507_034, "ACL_ERROR_RT_VECTOR_CORE_TIMEOUT", "a vector core took too long"),
    (RT_VECTOR_CORE_EXCEPTION, "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION", "a vector core stopped with an exception"),
    (507_899, "ACL_ERROR_RT_DRV_INTERNAL_ERROR", "the driver failed"),
];

/// The name of a code, and what it means.
pub(crate) fn name_of(code: Code) -> String {
    match NAMES.iter().find(|(known, ..)| *known == code) {
        Some((_, name, what)) => format!("{name} ({code}): {what}"),
        None => format!("aclError {code}"),
    }
}

/// Why something of the Ascend layer did not work.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AscendError {
    /// A library that is opened at run time is not there.
    #[error("{library} is missing: install CANN 8.1 or later, and source its set_env.sh")]
    LibraryMissing {
        /// Its file name.
        library: &'static str,
    },
    /// The library lacks a function.
    #[error("{name} is missing: install {}", if name.starts_with("aclrtIpc") { "CANN 8.5 or later, whose processes share memory by it" } else { "CANN 8.1 or later" })]
    FunctionMissing {
        /// The function.
        name: &'static str,
    },
    /// A device that does not exist was asked for.
    #[error("NPU {ordinal} was asked for, {present} are visible (ASCEND_RT_VISIBLE_DEVICES limits them)")]
    NoSuchDevice {
        /// The ordinal asked for.
        ordinal: u32,
        /// Devices that the driver shows.
        present: u32,
    },
    /// The device is none that the kernels are for.
    #[error("NPU {ordinal} is `{soc}`, the kernels are for Ascend 910B (Atlas A2)")]
    OtherSoc {
        /// Its ordinal.
        ordinal: u32,
        /// What it calls itself.
        soc: String,
    },
    /// There is no way between servers.
    #[error("{table} has no way between servers: ranks of one node only")]
    NoNetwork {
        /// Whose functions these are.
        table: &'static str,
    },
    /// A context of queues is not what kernels need.
    #[error("HCCL's context: {what} is {seen}, needed: {needed}")]
    Context {
        /// Its field.
        what: &'static str,
        /// What it holds.
        seen: u64,
        /// What it should hold, or the least of it.
        needed: u64,
    },
    /// What only a rank of this process has was asked of another.
    #[error("rank {rank} is another process: its window is not this one's to read")]
    OtherProcess {
        /// The rank.
        rank: u32,
    },
    /// One device cannot reach another's memory.
    #[error("NPU {from} cannot reach the memory of NPU {to}: they need HCCS between them")]
    NoPeerAccess {
        /// The device that would read and write.
        from: u32,
        /// The device whose memory it is.
        to: u32,
    },
    /// The file of the compiled kernels cannot be loaded.
    #[error("the file of kernels {path} failed: {cause}")]
    KernelsUnread {
        /// Its path.
        path: String,
        /// What the library says.
        cause: String,
    },
    /// A call failed.
    #[error("{call} failed: {cause}")]
    Call {
        /// The function.
        call: &'static str,
        /// The code's name and meaning, and what the library says besides.
        cause: String,
        /// The code.
        code: i32,
    },
    /// Bytes outside of a block of memory; nothing was touched.
    #[error("{len} bytes from byte {at} on lie outside of memory of {bytes} bytes")]
    Beyond {
        /// The first.
        at: usize,
        /// How many.
        len: usize,
        /// Of the block.
        bytes: usize,
    },
}

impl From<AscendError> for ep_core::Error {
    fn from(error: AscendError) -> Self {
        match &error {
            AscendError::Call { call, cause, code } if [RT_MEMORY_ALLOCATION, 207_018].contains(code) => {
                Self::broken(call, cause, "free memory of the NPU, or ask for less: smaller arena, fewer tokens")
            }
            AscendError::KernelsUnread { path, cause } => {
                let remedy = "name the file that the kernels' build.sh has made (EP_ASCEND_KERNELS)";
                Self::broken(format_args!("the file of kernels {path}"), cause, remedy)
            }
            AscendError::Call { call, cause, .. } => {
                Self::broken(call, cause, "what has failed on an NPU lasts: end the process, and start it anew")
            }
            AscendError::Beyond { at, len, bytes } => {
                let what = format_args!("end of {len} bytes from byte {at} on");
                Self::invalid(what, at.saturating_add(*len), format_args!("at most {bytes}, that of the memory"))
            }
            _ => Self::unsupported("the Ascend backend", error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_one_name_each() {
        for (at, (code, name, _)) in NAMES.iter().enumerate() {
            assert!(NAMES[..at].iter().all(|(other, taken, _)| other != code && taken != name), "{name}");
        }
        assert_eq!(name_of(RT_KERNEL_LOOKUP), "ACL_ERROR_RT_KERNEL_LOOKUP (507027): the binary has no such kernel");
        assert_eq!(name_of(5), "aclError 5");
    }

    #[test]
    fn what_is_missing_says_from_which_version_on_it_is_there() {
        let missing = |name| AscendError::FunctionMissing { name }.to_string();
        assert_eq!(missing("aclrtMalloc"), "aclrtMalloc is missing: install CANN 8.1 or later");
        assert!(missing("aclrtIpcMemClose").starts_with("aclrtIpcMemClose is missing: install CANN 8.5 or later"));
    }
}
