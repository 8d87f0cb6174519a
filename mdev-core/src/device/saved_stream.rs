//! A saved vGPU as a [stream](crate::stream) in pieces of any size, for the migration messages of
//! vfio-user.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::VirtualFunction;
use super::saved::{RestoreError, SaveError};
use crate::stream::{Head, MemoryReader, Part, StreamError, StreamParser, StreamWriter};

/// Error of a vGPU that is restored from pieces.
#[derive(Debug, thiserror::Error)]
pub enum IncomingError {
    /// An invalid stream.
    #[error("{0}")]
    Stream(#[from] StreamError),
    /// An invalid state.
    #[error("{0}")]
    Restore(#[from] RestoreError),
    /// The stream is that of another type of vGPU, or of a VM.
    #[error("The saved vGPU has another type, or is that of a VM")]
    Type,
    /// The state is no JSON of a vGPU.
    #[error("The saved vGPU cannot be read: {0}")]
    State(#[from] serde_json::Error),
    /// Video memory cannot be written.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Stream of a paused vGPU that is read in pieces.
#[derive(Debug)]
pub struct Outgoing {
    writer: StreamWriter<Vec<u8>>,
    /// Bytes of the writer's buffer that were read.
    read: usize,
    memory: MemoryReader,
    ended: bool,
}

impl Outgoing {
    /// Begins the stream of a paused vGPU.
    pub fn new(function: &mut VirtualFunction, head: &Head) -> Result<Self, SaveError> {
        let state = serde_json::to_vec(&function.save_vgpu()?).map_err(io::Error::from);
        let begun = state.and_then(|state| {
            let mut writer = StreamWriter::new(Vec::new(), head)?;
            writer.state(&state)?;
            Ok(writer)
        });
        let writer = begun.map_err(crate::gpu::GpuError::from)?;
        let vram = function.vram().ok_or(SaveError::Unsupported)?;
        let len = head.vram_bytes.min(vram.len);
        let file = vram.fd.try_clone_to_owned();
        let memory = file.and_then(|file| MemoryReader::new(file.into(), vram.offset, len));
        let memory = memory.map_err(crate::gpu::GpuError::from)?;
        Ok(Self { writer, read: 0, memory, ended: false })
    }

    /// Reads the next bytes. Fewer than asked for are the last ones.
    pub fn read(&mut self, data: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < data.len() {
            let buffer = self.writer.get_mut();
            if self.read == buffer.len() {
                buffer.clear();
                self.read = 0;
                if !self.produce()? {
                    break;
                }
                continue;
            }
            let len = (buffer.len() - self.read).min(data.len() - filled);
            data[filled..filled + len].copy_from_slice(&buffer[self.read..self.read + len]);
            self.read += len;
            filled += len;
        }
        Ok(filled)
    }

    /// Writes the next chunk into the buffer. Returns false after the end.
    fn produce(&mut self) -> io::Result<bool> {
        if self.ended {
            return Ok(false);
        }
        if let Some((offset, data)) = self.memory.next_chunk()? {
            self.writer.memory(offset, data)?;
        } else {
            self.ended = true;
            self.writer.end()?;
        }
        Ok(true)
    }
}

/// A vGPU that is restored from a stream that arrives in pieces.
#[derive(Debug, Default)]
pub struct Incoming {
    parser: StreamParser,
    state: Vec<u8>,
    /// File of the video memory and offset in it, once the state is restored.
    memory: Option<(File, u64)>,
}

impl Incoming {
    /// Adds the next bytes. After an error the vGPU has to be discarded.
    pub fn write(
        &mut self,
        function: &mut VirtualFunction,
        mdev_type: &str,
        bytes: &[u8],
    ) -> Result<(), IncomingError> {
        let Self { parser, state, memory } = self;
        parser.push(bytes);
        let vram_bytes = function.client().spec().vram_bytes;
        let Some(head) = parser.head()? else { return Ok(()) };
        if (&*head.mdev_type, head.vram_bytes) != (mdev_type, vram_bytes) {
            return Err(IncomingError::Type);
        }
        while let Some(part) = parser.next_part()? {
            match part {
                Part::State(data) => state.extend_from_slice(data),
                Part::Guest { .. } | Part::Next(_) | Part::Domain(_) | Part::Machine(_) => {
                    return Err(IncomingError::Type);
                }
                Part::Memory { .. } | Part::End if memory.is_none() => {
                    *memory = Some(restore(function, state)?);
                    write_memory(memory.as_ref(), &part)?;
                }
                Part::Memory { .. } | Part::End => write_memory(memory.as_ref(), &part)?,
            }
        }
        Ok(())
    }

    /// Returns whether the vGPU is restored completely.
    pub fn is_complete(&self) -> bool {
        self.parser.has_ended()
    }
}

fn restore(function: &mut VirtualFunction, state: &[u8]) -> Result<(File, u64), IncomingError> {
    function.restore_vgpu(&serde_json::from_slice(state)?)?;
    let vram = function.vram().ok_or(RestoreError::Now(SaveError::Unsupported))?;
    Ok((vram.fd.try_clone_to_owned()?.into(), vram.offset))
}

/// Writes the video memory of a part. The stream has checked that it is within the vGPU's.
fn write_memory(memory: Option<&(File, u64)>, part: &Part<'_>) -> io::Result<()> {
    match (memory, part) {
        (Some((file, start)), Part::Memory { offset, data }) => {
            file.write_all_at(data, start + offset)
        }
        _ => Ok(()),
    }
}
