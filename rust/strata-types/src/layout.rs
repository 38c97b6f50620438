//! Where a piece lies: `KvLayout` turns (layer, part, page) into a byte offset for any tier. One rule serves
//! layer-first pools, page-first arenas and records; `cuda/address.h` states the same rule for kernels.

use crate::GroupId;
use thiserror::Error;

/// What a layout cannot be.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum LayoutError {
    /// A size of zero describes no page.
    #[error("a KV shape needs {field} of at least 1, got 0")]
    Zero {
        /// The field that was zero.
        field: &'static str,
    },
    /// The copies move whole 4-byte words.
    #[error("a piece must be a multiple of 4 bytes, got {bytes}: choose another page size or dtype")]
    Piece {
        /// The size of the piece.
        bytes: usize,
    },
    /// The pool would not fit an address.
    #[error("{pages} pages of {page_bytes} bytes do not fit a 64-bit offset")]
    TooLarge {
        /// The number of pages.
        pages: u64,
        /// The bytes of one page.
        page_bytes: u64,
    },
}

/// How tensor parallelism cuts a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ShardSplit {
    /// Each shard holds this many heads.
    Sharded {
        /// Heads of one shard.
        heads: u32,
    },
    /// Each shard holds the whole part (one latent under MLA).
    Replicated,
}

/// The order of the bytes inside a piece. All layouts of a group must share it: a copy never permutes a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum InnerOrder {
    /// `[token][head][dim]`
    TokenHeadDim,
}

/// The shape of a group's KV: everything about a page but where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvShape {
    /// The group that this shape describes.
    pub group: GroupId,
    /// Layers of the group.
    pub layers: u32,
    /// Parts of a layer: 2 for K and V, 1 for a latent.
    pub parts: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// Bytes of one token in one layer and part: heads x dim x dtype.
    pub token_bytes: u32,
    /// How a part is cut among shards.
    pub split: ShardSplit,
    /// The order inside a piece.
    pub inner: InnerOrder,
}

impl KvShape {
    /// A shape of one unsharded group, checked.
    pub fn new(
        group: GroupId,
        layers: u32,
        parts: u32,
        page_size: u32,
        token_bytes: u32,
    ) -> Result<KvShape, LayoutError> {
        let fields =
            [("layers", layers), ("parts", parts), ("page_size", page_size), ("token_bytes", token_bytes)];
        if let Some((field, _)) = fields.iter().find(|(_, value)| *value == 0) {
            return Err(LayoutError::Zero { field });
        }
        let shape = KvShape {
            group,
            layers,
            parts,
            page_size,
            token_bytes,
            split: ShardSplit::Replicated,
            inner: InnerOrder::TokenHeadDim,
        };
        if !shape.piece_bytes().is_multiple_of(4) {
            return Err(LayoutError::Piece { bytes: shape.piece_bytes() });
        }
        Ok(shape)
    }

    /// Bytes of a page in one layer and part.
    pub fn piece_bytes(&self) -> usize {
        self.page_size as usize * self.token_bytes as usize
    }

    /// Bytes of a whole page.
    pub fn page_bytes(&self) -> usize {
        self.layers as usize * self.parts as usize * self.piece_bytes()
    }
}

/// (base, stride) per layer, part and page. Offsets are bytes from the start of the tier's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    /// The shape of the pages.
    pub shape: KvShape,
    /// Pages of the pool.
    pub pages: u32,
    /// Offset of (layer 0, part 0, page 0).
    pub base: u64,
    /// Bytes from one layer to the next.
    pub layer_stride: u64,
    /// Bytes from one part to the next.
    pub part_stride: u64,
    /// Bytes from one page to the next.
    pub page_stride: u64,
}

impl KvLayout {
    /// The device layout, `[layer][part][page][token][head][dim]`.
    pub fn layer_first(shape: KvShape, pages: u32) -> Result<KvLayout, LayoutError> {
        let piece = shape.piece_bytes() as u64;
        check_fits(shape.page_bytes() as u64, pages)?;
        let part_stride = piece * u64::from(pages);
        let layer_stride = part_stride * u64::from(shape.parts);
        Ok(KvLayout { shape, pages, base: 0, layer_stride, part_stride, page_stride: piece })
    }

    /// The layout of host, disk and wire, `[page][layer][part][token][head][dim]`, each page starting at a
    /// multiple of `alignment` bytes (at least 1).
    pub fn page_first(shape: KvShape, pages: u32, alignment: u64) -> Result<KvLayout, LayoutError> {
        let piece = shape.piece_bytes() as u64;
        let layer_stride = piece * u64::from(shape.parts);
        let page_stride = (shape.page_bytes() as u64).next_multiple_of(alignment.max(1));
        check_fits(page_stride, pages)?;
        Ok(KvLayout { shape, pages, base: 0, layer_stride, part_stride: piece, page_stride })
    }

    /// Offset of one piece. The caller keeps the indices inside the shape.
    pub fn offset(&self, layer: u32, part: u32, page: u32) -> u64 {
        self.base
            + u64::from(layer) * self.layer_stride
            + u64::from(part) * self.part_stride
            + u64::from(page) * self.page_stride
    }

    /// Bytes from the start of the memory to the end of the last piece.
    pub fn total_bytes(&self) -> u64 {
        if self.pages == 0 {
            return self.base;
        }
        self.offset(self.shape.layers - 1, self.shape.parts - 1, self.pages - 1)
            + self.shape.piece_bytes() as u64
    }
}

fn check_fits(page_bytes: u64, pages: u32) -> Result<(), LayoutError> {
    match page_bytes.checked_mul(u64::from(pages)) {
        Some(total) if total <= u64::MAX / 2 => Ok(()),
        _ => Err(LayoutError::TooLarge { pages: u64::from(pages), page_bytes }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_never_overlap(layers in 1u32..5, parts in 1u32..3, page_size in 1u32..9, words in 1u32..5,
                                pages in 1u32..7, alignment in prop::sample::select(vec![1u64, 64, 4096])) {
            let shape = KvShape::new(GroupId(0), layers, parts, page_size, words * 4).unwrap();
            for layout in [KvLayout::layer_first(shape, pages).unwrap(),
                           KvLayout::page_first(shape, pages, alignment).unwrap()] {
                let mut starts: Vec<u64> = (0..layers).flat_map(|layer| (0..parts).flat_map(move |part| {
                    (0..pages).map(move |page| layout.offset(layer, part, page))
                })).collect();
                starts.sort_unstable();
                for pair in starts.windows(2) {
                    prop_assert!(pair[1] - pair[0] >= shape.piece_bytes() as u64);
                }
                prop_assert_eq!(starts.last().unwrap() + shape.piece_bytes() as u64, layout.total_bytes());
            }
        }
    }

    #[test]
    fn bad_shapes_say_what_is_wrong() {
        assert_eq!(KvShape::new(GroupId(0), 0, 2, 16, 4), Err(LayoutError::Zero { field: "layers" }));
        assert_eq!(KvShape::new(GroupId(0), 1, 2, 1, 6), Err(LayoutError::Piece { bytes: 6 }));
        let shape = KvShape::new(GroupId(0), 1000, 2, 1000, 1 << 30).unwrap();
        assert!(matches!(KvLayout::layer_first(shape, u32::MAX), Err(LayoutError::TooLarge { .. })));
    }
}
