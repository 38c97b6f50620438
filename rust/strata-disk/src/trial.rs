//! A trial of a disk that failed: a block is written to a file of its own, made safe, read back past the page cache
//! where payloads are, and compared. It goes through the store's engine, as transfers do.

use crate::engine::{Buffer, Io, Lane, Operation, Part, SegmentBytes, SegmentFile};
use crate::geometry::BLOCK;
use crate::health::is_full;
use crate::store::Shared;
use crossbeam_channel::{bounded, RecvTimeoutError};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// How soon a trial notices that the store closes.
const GLANCE: Duration = Duration::from_millis(10);

/// Whether the disk takes a block and gives it back. Blocks as long as the disk does, or until the store closes.
pub(crate) fn try_disk(shared: &Shared) -> io::Result<()> {
    let engine = shared.engine.as_ref();
    let path = shared.segments.scratch();
    shared.segments.make_folder()?;
    engine.remove(&path)?;
    let bytes = SegmentBytes { headers: BLOCK, payloads: BLOCK };
    let file = match engine.create(&path, bytes, &[]) {
        // A full disk answers: reads go on, and spills say for themselves that there is no room.
        Err(error) if is_full(&error) => return Ok(()),
        made => Arc::new(made?),
    };
    let outcome = write_and_read(shared, &file);
    engine.remove(&path)?;
    outcome
}

fn write_and_read(shared: &Shared, file: &Arc<SegmentFile>) -> io::Result<()> {
    let pattern: Vec<u8> = (0..BLOCK).map(|index| (index * 31 + 7) as u8).collect();
    let target = || (Arc::clone(file), Part::Payloads);
    let (held, part) = target();
    let write = Operation::Write { file: held, part, offset: 0 };
    perform(shared, Lane::Write, write, Block::holding(&pattern))?;
    shared.engine.sync(file)?;
    let (held, part) = target();
    let read = Operation::Read { file: held, part, offset: 0 };
    let back = perform(shared, Lane::Read, read, Block::holding(&[]))?;
    if back.bytes() != pattern {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a block that was written came back otherwise",
        ));
    }
    Ok(())
}

/// A block of memory at a multiple of its size, as O_DIRECT asks for.
struct Block {
    memory: Vec<u8>,
    start: usize,
}

impl Block {
    fn holding(front: &[u8]) -> Block {
        let mut memory = vec![0_u8; 2 * BLOCK as usize];
        let start = memory.as_ptr().align_offset(BLOCK as usize).min(BLOCK as usize);
        memory[start..start + front.len()].copy_from_slice(front);
        Block { memory, start }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + BLOCK as usize]
    }
}

fn perform(shared: &Shared, lane: Lane, operation: Operation, mut block: Block) -> io::Result<Block> {
    let start = block.start;
    let pointer = NonNull::from(&mut block.memory[start]);
    // SAFETY: `block` moves into the `then` below; its heap block, which has BLOCK bytes from `start` on, stays where
    // it is until that has run.
    let buffers = vec![unsafe { Buffer::new(pointer, BLOCK as usize) }];
    let (sender, answer) = bounded(1);
    let then = Box::new(move |result: io::Result<usize>| {
        // Nobody listens only if the store closes.
        let _stopped = sender.try_send(result.map(|moved| (moved, block)));
        None
    });
    shared.engine.submit(Io { lane, operation, buffers, started: None, then });
    loop {
        match answer.recv_timeout(GLANCE) {
            Ok(Ok((moved, block))) if moved == BLOCK as usize => return Ok(block),
            Ok(Ok(_)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(Err(error)) => return Err(error),
            Err(RecvTimeoutError::Disconnected) => return Err(io::ErrorKind::BrokenPipe.into()),
            Err(RecvTimeoutError::Timeout) if shared.is_closing() => {
                return Err(io::ErrorKind::Interrupted.into())
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}
