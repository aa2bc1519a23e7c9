//! Layouts of a framework's tensors, through the exchange interface of DLPack 1.
//!
//! A program that repeats calls finds by their layouts what it has prepared for them. Asking the framework in C takes a
//! fraction of the time of asking it in Python.

use std::ffi::c_void;

/// DLPack's `DLTensor`: the view of a tensor that its framework owns.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct XaView {
    /// First element, without `byte_offset`.
    pub data: *mut c_void,
    /// DLPack's number of the kind of device.
    pub device_type: i32,
    /// Which device of that kind.
    pub device_id: i32,
    /// Number of dimensions.
    pub rank: i32,
    /// DLPack's `DLDataType`.
    pub dtype: u32,
    /// `rank` sizes.
    pub dims: *const i64,
    /// `rank` distances in elements, or null for a dense tensor.
    pub strides: *const i64,
    /// Distance of the first element from `data`.
    pub byte_offset: u64,
}

/// Tensors to be described by `xa_layouts`. A program sets all of it to 0 first, since later versions have more fields.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct XaLayouts {
    /// `sizeof` of this struct, which only grows at its end.
    pub struct_size: usize,
    /// The list of tensors, for `item`.
    pub list: *mut c_void,
    /// Their number.
    pub count: usize,
    /// The element of a list at an index, or null, such as `PyList_GetItem` of Python.
    pub item: Option<unsafe extern "C" fn(list: *mut c_void, index: isize) -> *mut c_void>,
    /// Describes a tensor and returns 0, such as `dltensor_from_py_object_no_sync` of DLPack's `DLPackExchangeAPI`.
    pub describe: Option<unsafe extern "C" fn(tensor: *mut c_void, view: *mut XaView) -> i32>,
    /// Here the addresses of the tensors are written.
    pub addresses: *mut *mut c_void,
    /// Here their layouts are written.
    pub key: *mut u8,
    /// Room at `key`.
    pub capacity: usize,
}

/// The tensors cannot be described, or the request is unknown.
pub(crate) const FAILED: i32 = -1;
/// The key is longer than the room for it.
const NO_ROOM: i32 = -2;

/// Writes addresses and key; returns the key's length, or a negative number.
///
/// # Safety
/// As `xa_layouts` in `c_api`.
pub(crate) unsafe fn write(request: *const XaLayouts) -> i32 {
    const KNOWN_SIZE: usize = size_of::<XaLayouts>();
    // SAFETY: the caller guarantees a struct that begins with its size, and that its bytes are readable.
    let tail = unsafe {
        let size = (&raw const (*request).struct_size).read();
        if size < KNOWN_SIZE {
            return FAILED;
        }
        std::slice::from_raw_parts(request.cast::<u8>().add(KNOWN_SIZE), size - KNOWN_SIZE)
    };
    if tail.iter().any(|byte| *byte != 0) {
        return FAILED;
    }
    // SAFETY: the size covers all fields of this version.
    let request = unsafe { &*request };
    let &XaLayouts { list, count, item: Some(item), describe: Some(describe), addresses, key, capacity, .. } = request
    else {
        return FAILED;
    };
    // SAFETY: the caller guarantees room for `capacity` bytes.
    let mut key = Key { first: key, len: 0, capacity };
    for index in 0..count {
        let mut view = XaView {
            data: std::ptr::null_mut(),
            device_type: 0,
            device_id: 0,
            rank: 0,
            dtype: 0,
            dims: std::ptr::null(),
            strides: std::ptr::null(),
            byte_offset: 0,
        };
        // SAFETY: the caller guarantees a list of `count` tensors, and both functions.
        unsafe {
            let tensor = item(list, index as isize);
            if tensor.is_null() || describe(tensor, &raw mut view) != 0 {
                return FAILED;
            }
            let address = view.data.wrapping_byte_add(view.byte_offset as usize);
            addresses.add(index).write(address);
            // The addresses up to this one have been written.
            let same = std::slice::from_raw_parts(addresses, index + 1).iter().position(|other| *other == address);
            key.push(same.unwrap_or(index) as u64);
            for number in [view.device_type, view.device_id, view.rank] {
                key.push(u64::from(number.cast_unsigned()));
            }
            key.push(u64::from(view.dtype));
            key.push(u64::from(view.strides.is_null()));
            for numbers in [view.dims, view.strides] {
                for axis in 0..if numbers.is_null() { 0 } else { view.rank.max(0) as usize } {
                    key.push(numbers.add(axis).read().cast_unsigned());
                }
            }
        }
    }
    i32::try_from(key.len).ok().filter(|_| key.len <= capacity).unwrap_or(NO_ROOM)
}

/// Numbers of 7 bits per byte, the last byte of each below 128, so that no two lists of numbers have the same bytes.
struct Key {
    first: *mut u8,
    len: usize,
    capacity: usize,
}

impl Key {
    fn push(&mut self, mut number: u64) {
        loop {
            let is_last = number < 128;
            if self.len < self.capacity {
                // SAFETY: the caller of `write` guarantees room for `capacity` bytes.
                unsafe { self.first.add(self.len).write(number as u8 & 127 | if is_last { 0 } else { 128 }) };
            }
            self.len += 1;
            if is_last {
                return;
            }
            number >>= 7;
        }
    }
}
