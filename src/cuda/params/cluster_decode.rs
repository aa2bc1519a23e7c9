//! `cluster_decode`, in which the CTAs of a cluster merge split tiles through distributed shared memory.

/// Maximum sequence slots: each lane of a warp plans one of them.
pub const CLUSTER_DECODE_SLOTS: i32 = 32;

/// Maximum CTAs of a cluster. Larger ones need an attribute of the kernel, and fewer of them fit on a GPU.
pub const LARGEST_CLUSTER: i32 = 8;
