//! A saved vGPU as a [stream](crate::stream) in pieces of any size, for the migration messages of
//! vfio-user.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::VirtualFunction;
use super::saved::{RestoreError, SaveError, SavedMemory};
use crate::gpu::{Aperture, StagedCopy};
use crate::stream::{
    Head, MemoryReader, Part, StagedReader, StagedWriter, StreamError, StreamParser, StreamWriter,
};

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

/// Reader of video memory.
#[derive(Debug)]
enum VideoMemory {
    File(MemoryReader),
    Staged(StagedReader),
}

/// Writer of video memory.
#[derive(Debug)]
enum Filling {
    /// File of the video memory and offset in it.
    File(File, u64),
    Staged(StagedWriter),
}

/// Stream of a paused vGPU that is read in pieces.
#[derive(Debug)]
pub struct Outgoing {
    writer: StreamWriter<Vec<u8>>,
    /// Bytes of the writer's buffer that were read.
    read: usize,
    memory: VideoMemory,
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
        let SavedMemory { aperture: Aperture { fd, offset, len }, staged } =
            function.saved_memory()?;
        let memory = if staged {
            StagedReader::new(fd.into(), len, head.vram_bytes).map(VideoMemory::Staged)
        } else {
            MemoryReader::new(fd.into(), offset, head.vram_bytes.min(len)).map(VideoMemory::File)
        };
        let memory = memory.map_err(crate::gpu::GpuError::from)?;
        Ok(Self { writer, read: 0, memory, ended: false })
    }

    /// Reads the next bytes. Fewer than asked for are the last ones.
    pub fn read(&mut self, function: &mut VirtualFunction, data: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < data.len() {
            let buffer = self.writer.get_mut();
            if self.read == buffer.len() {
                buffer.clear();
                self.read = 0;
                if !self.produce(function)? {
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
    fn produce(&mut self, function: &mut VirtualFunction) -> io::Result<bool> {
        if self.ended {
            return Ok(false);
        }
        let chunk = match &mut self.memory {
            VideoMemory::File(memory) => memory.next_chunk()?,
            VideoMemory::Staged(memory) => memory.next_chunk(|copy| copy_staged(function, copy))?,
        };
        if let Some((offset, data)) = chunk {
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
    /// Writer of the video memory, once the state is restored.
    memory: Option<Filling>,
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
                Part::Memory { .. } | Part::End => {
                    let filling = match memory.take() {
                        Some(filling) => filling,
                        None => restore(function, state)?,
                    };
                    write_memory(memory.insert(filling), function, &part)?;
                }
            }
        }
        Ok(())
    }

    /// Returns whether the vGPU is restored completely.
    pub fn is_complete(&self) -> bool {
        self.parser.has_ended()
    }
}

fn restore(function: &mut VirtualFunction, state: &[u8]) -> Result<Filling, IncomingError> {
    function.restore_vgpu(&serde_json::from_slice(state)?)?;
    let vram_bytes = function.client().spec().vram_bytes;
    let SavedMemory { aperture: Aperture { fd, offset, len }, staged } =
        function.saved_memory().map_err(RestoreError::Now)?;
    if staged {
        return Ok(Filling::Staged(StagedWriter::new(fd.into(), len, vram_bytes)?));
    }
    Ok(Filling::File(fd.into(), offset))
}

/// Writes the video memory of a part. The stream has checked that it is within the vGPU's.
fn write_memory(
    memory: &mut Filling,
    function: &mut VirtualFunction,
    part: &Part<'_>,
) -> Result<(), IncomingError> {
    match (memory, part) {
        (Filling::File(file, start), Part::Memory { offset, data }) => {
            file.write_all_at(data, *start + offset)?;
        }
        (Filling::Staged(memory), Part::Memory { offset, data }) => {
            memory.write(*offset, data, |copy| copy_staged(function, copy))?;
        }
        (Filling::Staged(memory), _) => memory.flush(|copy| copy_staged(function, copy))?,
        (Filling::File(..), _) => {}
    }
    Ok(())
}

fn copy_staged(function: &mut VirtualFunction, copy: StagedCopy) -> io::Result<()> {
    function.copy_staged(copy).map_err(io::Error::other)
}
