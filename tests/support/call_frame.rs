//! Calls a handler as XLA does, with hand-made `XLA_FFI_CallFrame`s. XLA itself is not in the process.

use super::c_structs::{
    Api, ApiVersion, Attributes, Buffers, ByteSpan, CallFrame, Extension, FRAME_STRUCT_SIZE, FfiBuffer, Metadata,
    MetadataExtension, Scalar, ScalarArray,
};
use super::mock_api::{API, Context, live_errors, take_error};
use super::{Attr, Dtype, GuardedBuffer, HostPool, InlinePool, Side};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::mem::{offset_of, size_of};
use std::ptr::{null, null_mut};
use xla_attention::{Target, Targets};

/// The handler of a target for one stage.
pub type Handler = unsafe extern "C" fn(*mut c_void) -> *mut c_void;

/// `XLA_FFI_ExecutionStage`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub enum Stage {
    Instantiate = 0,
    Prepare = 1,
    Initialize = 2,
    Execute = 3,
}

/// An error that a handler has returned: its `XLA_FFI_Error_Code` and its text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    pub code: i32,
    pub text: String,
}

pub const INVALID_ARGUMENT: i32 = 3;
pub const UNIMPLEMENTED: i32 = 12;
pub const INTERNAL: i32 = 13;
pub const UNAVAILABLE: i32 = 14;

pub const CPU: &str = "cpu";
pub const CUDA: &str = "CUDA";

fn text(p: *const c_char) -> &'static str {
    // SAFETY: the tables hold C strings that live as long as the library.
    unsafe { CStr::from_ptr(p) }.to_str().unwrap()
}

/// The handlers that are built for one version of the FFI.
#[derive(Clone, Copy)]
pub struct HandlerSet {
    /// (major, minor).
    pub version: (i32, i32),
    pub rows: &'static [Target],
}

impl HandlerSet {
    /// The entry with this name and platform.
    pub fn target(&self, name: &str, platform: &str) -> &'static Target {
        let found = self.rows.iter().find(|t| text(t.name) == name && text(t.platform) == platform);
        found.unwrap_or_else(|| panic!("no target {name} for {platform}"))
    }

    /// A frame for the execute handler of a target.
    pub fn frame<'a>(&self, name: &str, platform: &str) -> Frame<'a> {
        Frame::of(self.target(name, platform).execute.expect("every target has an execute handler"), Stage::Execute)
    }

    /// Converts an expected refusal to what this set's handlers return in `stage`. The conformance tables have the
    /// texts of API 0.1; newer headers put the stage before the text of a wrong count.
    pub fn expected_refusal(&self, stage: Stage, refusal: &Refusal) -> Refusal {
        if self.version < (0, 2) || !refusal.text.starts_with("Wrong number of ") {
            return refusal.clone();
        }
        Refusal { code: refusal.code, text: format!("[{}] {}", format!("{stage:?}").to_lowercase(), refusal.text) }
    }
}

/// The handler sets of the library, ordered from the oldest API version to the newest.
pub fn handler_sets() -> Vec<HandlerSet> {
    // SAFETY: `xa_handler_set` returns null or a table that lives as long as the library.
    let table = |number| unsafe { xla_attention::xa_handler_set(number).as_ref() };
    let set = |table: &Targets| HandlerSet {
        version: (table.api_major, table.api_minor),
        // SAFETY: the table has `count` rows at `rows`.
        rows: unsafe { std::slice::from_raw_parts(table.rows, table.count) },
    };
    (0..).map_while(table).map(set).collect()
}

/// The entry of `xla_attention::targets()` with this name and platform.
pub fn target(name: &str, platform: &str) -> &'static Target {
    HandlerSet { version: (0, 1), rows: xla_attention::targets() }.target(name, platform)
}

struct View {
    dtype: i32,
    data: *mut u8,
    dims: Vec<i64>,
}

/// A call frame under construction. It borrows its buffers and its thread pool.
pub struct Frame<'a> {
    handler: Handler,
    stage: Stage,
    struct_size: usize,
    operands: Vec<View>,
    results: Vec<View>,
    attributes: BTreeMap<String, Attr>,
    pool: &'a dyn HostPool,
    stream: Option<usize>,
    api: *const Api,
}

impl<'a> Frame<'a> {
    /// A frame for the execute handler of a target on a platform, [`CPU`] or [`CUDA`].
    pub fn new(name: &str, platform: &str) -> Self {
        let handler = target(name, platform).execute.expect("every target has an execute handler");
        Self::of(handler, Stage::Execute)
    }

    /// A frame for any handler, with this stage in it.
    pub fn of(handler: Handler, stage: Stage) -> Self {
        Self {
            handler,
            stage,
            struct_size: FRAME_STRUCT_SIZE,
            operands: Vec::new(),
            results: Vec::new(),
            attributes: BTreeMap::new(),
            pool: &InlinePool(4),
            stream: None,
            api: &raw const API,
        }
    }

    /// Adds an operand at address `data`.
    ///
    /// # Safety
    ///
    /// The memory at `data` has this dtype and shape and outlives the frame, or the handler refuses the call.
    pub unsafe fn operand(mut self, dtype: Dtype, dims: &[i64], data: *mut u8) -> Self {
        self.operands.push(View { dtype: dtype.0, data, dims: dims.to_vec() });
        self
    }

    /// Adds a result at address `data`.
    ///
    /// # Safety
    ///
    /// As for [`Frame::operand`].
    pub unsafe fn result(mut self, dtype: Dtype, dims: &[i64], data: *mut u8) -> Self {
        self.results.push(View { dtype: dtype.0, data, dims: dims.to_vec() });
        self
    }

    pub fn attribute(mut self, name: &str, value: Attr) -> Self {
        self.attributes.insert(name.to_owned(), value);
        self
    }

    pub fn attributes(self, list: &[(&str, Attr)]) -> Self {
        list.iter().fold(self, |frame, (name, value)| frame.attribute(name, value.clone()))
    }

    pub fn pool(mut self, pool: &'a dyn HostPool) -> Self {
        self.pool = pool;
        self
    }

    /// The stream that `XLA_FFI_Stream_Get` returns. Without one the execution context is that of a CPU.
    pub fn stream(mut self, stream: usize) -> Self {
        self.stream = Some(stream);
        self
    }

    /// The API table of a host with another API version.
    pub fn api(mut self, api: &'a HostApiTable) -> Self {
        self.api = api.0.data().cast();
        self
    }

    /// The `struct_size` of the frame, if it is not that of API 0.1.
    pub fn struct_size(mut self, bytes: usize) -> Self {
        self.struct_size = bytes;
        self
    }

    /// Calls the handler.
    pub fn run(&self) -> Result<(), Refusal> {
        let arguments = BufferList::new(&self.operands);
        let results = BufferList::new(&self.results);
        // XLA passes attributes in the order of their names, and so does a `BTreeMap`.
        let attributes = AttributeList::new(&self.attributes);
        let context = Context { pool: self.pool, stream: self.stream };
        let mut frame = CallFrame {
            struct_size: self.struct_size,
            extension_start: null_mut(),
            api: self.api,
            context: (&raw const context).cast(),
            stage: self.stage as i32,
            arguments: arguments.raw(),
            results: results.raw(),
            attributes: attributes.raw(),
            future: null_mut(),
        };
        let live = live_errors();
        // SAFETY: the frame is complete, and everything that it points to outlives the call.
        let error = unsafe { (self.handler)((&raw mut frame).cast()) };
        assert!(frame.future.is_null(), "the handler made a future");
        let outcome = refusal(error);
        assert_eq!(live_errors(), live, "an error was made and neither returned nor destroyed");
        outcome
    }
}

/// Converts what a handler has returned.
fn refusal(error: *mut c_void) -> Result<(), Refusal> {
    if error.is_null() {
        return Ok(());
    }
    let error = take_error(error.cast());
    Err(Refusal { code: error.code, text: error.text.to_string_lossy().into_owned() })
}

struct BufferList {
    types: Vec<i32>,
    pointers: Vec<*const FfiBuffer>,
    _buffers: Vec<FfiBuffer>,
}

impl BufferList {
    fn new(views: &[View]) -> Self {
        let buffers: Vec<FfiBuffer> = views
            .iter()
            .map(|v| FfiBuffer {
                struct_size: size_of::<FfiBuffer>(),
                extension_start: null_mut(),
                dtype: v.dtype,
                data: v.data,
                rank: v.dims.len() as i64,
                dims: v.dims.as_ptr(),
            })
            .collect();
        let pointers = buffers.iter().map(|b| &raw const *b).collect();
        Self { types: vec![1; views.len()], pointers, _buffers: buffers }
    }

    fn raw(&self) -> Buffers {
        Buffers {
            struct_size: size_of::<Buffers>(),
            extension_start: null_mut(),
            size: self.pointers.len() as i64,
            types: self.types.as_ptr(),
            items: self.pointers.as_ptr(),
        }
    }
}

/// An attribute in XLA's representation.
enum EncodedAttribute {
    Scalar(Scalar),
    Array(ScalarArray),
    Text(ByteSpan),
}

impl EncodedAttribute {
    /// The result points into `value`.
    fn new(value: &Attr) -> Self {
        fn scalar<T>(dtype: i32, value: &T) -> EncodedAttribute {
            EncodedAttribute::Scalar(Scalar { dtype, value: (&raw const *value).cast() })
        }
        match value {
            Attr::Bool(value) => scalar(1, value),
            Attr::I32(value) => scalar(4, value),
            Attr::I64(value) => scalar(5, value),
            Attr::F32(value) => scalar(11, value),
            Attr::F64(value) => scalar(12, value),
            Attr::I64s(list) => Self::Array(ScalarArray { dtype: 5, size: list.len(), data: list.as_ptr().cast() }),
            Attr::Text(text) => Self::Text(ByteSpan { data: text.as_ptr().cast(), len: text.len() }),
        }
    }

    /// `XLA_FFI_AttrType`, and the address of the structure.
    fn raw(&self) -> (i32, *const c_void) {
        match self {
            Self::Array(array) => (1, (&raw const *array).cast()),
            Self::Scalar(scalar) => (3, (&raw const *scalar).cast()),
            Self::Text(span) => (4, (&raw const *span).cast()),
        }
    }
}

struct AttributeList {
    types: Vec<i32>,
    names: Vec<*const ByteSpan>,
    values: Vec<*const c_void>,
    _spans: Vec<ByteSpan>,
    _laid: Vec<EncodedAttribute>,
}

impl AttributeList {
    /// The result points into `attributes`.
    fn new(attributes: &BTreeMap<String, Attr>) -> Self {
        let span = |name: &String| ByteSpan { data: name.as_ptr().cast(), len: name.len() };
        let spans: Vec<ByteSpan> = attributes.keys().map(span).collect();
        let laid: Vec<EncodedAttribute> = attributes.values().map(EncodedAttribute::new).collect();
        let (types, values) = laid.iter().map(EncodedAttribute::raw).unzip();
        Self { types, names: spans.iter().map(|s| &raw const *s).collect(), values, _spans: spans, _laid: laid }
    }

    fn raw(&self) -> Attributes {
        Attributes {
            struct_size: size_of::<Attributes>(),
            extension_start: null_mut(),
            size: self.types.len() as i64,
            types: self.types.as_ptr(),
            names: self.names.as_ptr(),
            values: self.values.as_ptr(),
        }
    }
}

/// The metadata of a handler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HandlerMetadata {
    pub major: i32,
    pub minor: i32,
    /// `XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE`.
    pub command_buffer_compatible: bool,
}

/// The API table of a runtime with an older or newer API. It ends at a guard page.
pub struct HostApiTable(GuardedBuffer);

impl HostApiTable {
    /// A table with `entries` entries. The first ones are those of [`API`]; handlers must not call the further ones,
    /// which a newer API appends.
    pub fn new((major, minor): (i32, i32), entries: usize) -> Self {
        let header = offset_of!(Api, entries);
        let bytes = header + entries * size_of::<usize>();
        let memory = GuardedBuffer::new("XLA_FFI_Api", Side::EndsAtGuard, &vec![0; bytes]);
        let table = memory.data();
        // SAFETY: the memory has `bytes` bytes. It ends at a page and is therefore aligned to 8. Of `API`, at most its
        // size is read.
        unsafe {
            table.copy_from_nonoverlapping((&raw const API).cast(), bytes.min(size_of::<Api>()));
            table.cast::<usize>().write(bytes);
            let version = table.add(offset_of!(Api, version)).cast::<ApiVersion>();
            (*version).major = major;
            (*version).minor = minor;
        }
        Self(memory)
    }
}

with_defaults! {
    /// How a host asks a handler for its metadata.
    #[derive(Clone, Copy)]
    pub struct MetadataRequest {
        /// Whether the frame has an API table. XLA passes none.
        pub with_api: bool = true,
        pub stage: Stage = Stage::Execute,
        pub extension_size: usize = size_of::<MetadataExtension>(),
        /// `XLA_FFI_Metadata_STRUCT_SIZE` of the host. A newer API may append members to the 40 bytes of API 0.1.
        pub metadata_size: usize = offset_of!(Metadata, traits) + size_of::<u32>(),
        /// `sizeof(XLA_FFI_Metadata)` of the host. From API 0.2 on it has a last member, `state_type_id`, which
        /// `XLA_FFI_Metadata_STRUCT_SIZE` does not count.
        pub room: usize = size_of::<Metadata>(),
    }
}

impl MetadataRequest {
    /// The request of the oldest host that accepts handlers of this version.
    pub fn of(version: (i32, i32)) -> Self {
        let room = if version < (0, 2) { size_of::<Metadata>() } else { size_of::<Metadata>() + size_of::<i64>() };
        Self { room, ..Self::default() }
    }
}

/// Makes the call with which XLA reads a handler's metadata at registration.
///
/// The metadata structure ends at a guard page, so that a handler that was built with a longer structure faults.
pub fn request_metadata(handler: Handler, request: MetadataRequest) -> Result<HandlerMetadata, Refusal> {
    let room = request.metadata_size.next_multiple_of(8).max(request.room);
    let memory = GuardedBuffer::new("XLA_FFI_Metadata", Side::EndsAtGuard, &vec![0xee; room]);
    let metadata = memory.data().cast::<Metadata>();
    // SAFETY: the memory has at least 40 bytes and ends at a page, so it is aligned to 8.
    unsafe { (*metadata).struct_size = request.metadata_size };
    let mut extension = MetadataExtension {
        base: Extension { struct_size: request.extension_size, kind: 1, next: null_mut() },
        metadata,
    };
    let nothing = BufferList::new(&[]);
    let no_attributes = AttributeList::new(&BTreeMap::new());
    let mut frame = CallFrame {
        struct_size: FRAME_STRUCT_SIZE,
        extension_start: (&raw mut extension).cast(),
        api: if request.with_api { &raw const API } else { null() },
        context: null(),
        stage: request.stage as i32,
        arguments: nothing.raw(),
        results: nothing.raw(),
        attributes: no_attributes.raw(),
        future: null_mut(),
    };
    // SAFETY: a handler reads nothing else of a frame with the metadata extension.
    let error = unsafe { handler((&raw mut frame).cast()) };
    refusal(error)?;
    assert!(
        memory.bytes()[request.room..].iter().all(|&b| b == 0xee),
        "what the handler's API does not know was written"
    );
    memory.assert_slack_untouched();
    // SAFETY: `memory` is alive and holds the structure.
    let metadata = unsafe { &*metadata };
    assert_eq!(metadata.version.struct_size, 24);
    Ok(HandlerMetadata {
        major: metadata.version.major,
        minor: metadata.version.minor,
        command_buffer_compatible: metadata.traits & 1 == 1,
    })
}
