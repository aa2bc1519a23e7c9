//! The boxes of prefill's tensor maps, and which keys TMA and `cp.async` load.

use super::super::tests::{first_kernel, of_dims, paged, ragged};
use super::*;
use crate::cuda::attention::tests::device;
use crate::problem::attention::{Keys, PageTable};
use crate::tensor::DType;

#[test]
fn narrow_heads_are_boxes_of_one_atom_column() {
    for (head_dim, value_dim, page_size, keys) in
        [(40, 64, 16, 16), (40, 64, 128, 128), (80, 80, 128, 16), (72, 96, 16, 16), (128, 120, 64, 64)]
    {
        let problem = of_dims(&paged(page_size), head_dim, value_dim);
        let prefill = HopperPrefill::of(&problem, &device(true)).expect("the kernel takes it");
        assert!(prefill.loads_kv_by_tma(&problem) && prefill.clips_columns(&problem));
        assert_eq!(prefill.keys_per_box(&problem), keys, "D {head_dim}, pages of {page_size}");
        // Several atom columns of pages are in the blocks of contiguous keys.
        let storage = if head_dim == 40 { "_paged_" } else { "_contiguous_" };
        assert!(first_kernel(&problem).contains(storage));
        let atom_row = prefill.tile.kv_atom_row();
        let lens = |axes: &[Axis]| axes.iter().map(|axis| (axis.len, axis.box_len)).collect::<Vec<_>>();
        let [columns, tokens, heads, ..] = prefill.key_axes(&problem, &problem.v, value_dim, keys);
        assert_eq!(lens(&[columns, tokens, heads]), [(value_dim as i64, atom_row), (8, 8), (2, 1)]);
        assert_eq!(heads.stride, 256);
        let [columns, heads, packs, _, atom_columns] = prefill.query_axes(&problem);
        assert_eq!(lens(&[columns, heads, packs, atom_columns]), [(head_dim as i64, atom_row), (6, 6), (2, 1), (1, 1)]);
    }
    // Heads need not be at multiples of an atom row.
    let mut odd_heads = of_dims(&paged(16), 80, 80);
    odd_heads.k.head_stride = 136;
    let prefill = HopperPrefill::of(&odd_heads, &device(true)).expect("the kernel takes it");
    assert!(prefill.loads_kv_by_tma(&odd_heads));
}

#[test]
fn a_row_of_256_columns_leaves_as_a_box_for_each_atom_column_in_fp8() {
    for (dim, atom_columns) in [(64, 1), (128, 2), (256, 1)] {
        let plain = of_dims(&ragged(), dim, dim);
        let q = Tensor { dtype: DType::F8E4M3FN, ..plain.q };
        let problem = Attention { q, kv_dtype: DType::F8E4M3FN, ..plain };
        let prefill = HopperPrefill::of(&problem, &device(true)).expect("the kernel takes it");
        assert_eq!(prefill.out_axes(&problem)[4].box_len, atom_columns, "D {dim}");
    }
}

#[test]
fn boxes_are_within_one_page_and_one_block() {
    for (page_size, keys) in [(8, 8), (16, 16), (24, 8), (48, 16), (128, 128), (1024, 128)] {
        let problem = paged(page_size);
        let prefill = HopperPrefill::of(&problem, &device(true)).expect("the kernel takes it");
        assert_eq!(prefill.keys_per_box(&problem), keys, "pages of {page_size}");
    }
}

#[test]
fn pages_that_tma_cannot_load_take_cp_async() {
    let mut odd_heads = paged(16);
    odd_heads.k.head_stride = 136;
    let broadcast = Attention { v: KvView { token_stride: 0, ..odd_heads.v }, ..paged(16) };
    for problem in [paged(1), paged(4), paged(12), paged(100), odd_heads, broadcast] {
        let prefill = HopperPrefill::of(&problem, &device(true)).expect("the kernel takes it");
        assert!(!prefill.loads_kv_by_tma(&problem));
    }
    for problem in [paged(8), paged(16), ragged()] {
        let prefill = HopperPrefill::of(&problem, &device(true)).expect("the kernel takes it");
        assert!(prefill.loads_kv_by_tma(&problem));
    }
}

#[test]
fn chunk_indices_past_32_bits_take_the_portable_kernel() {
    let far = |page_stride, num_pages| {
        let KeyStorage::Paged(table) = paged(4).keys.storage else { unreachable!() };
        let storage = KeyStorage::Paged(PageTable { num_pages, ..table });
        let k = KvView { page_stride, ..paged(4).k };
        Attention { k, keys: Keys { storage, ..paged(4).keys }, ..paged(4) }
    };
    let is_taken = |problem| HopperPrefill::of(&problem, &device(true)).is_some();
    // The last row of a head begins 3 tokens after its last page.
    assert!(is_taken(far((8 << 32) - 8 - 3 * 512, 2)));
    assert!(!is_taken(far((8 << 32) - 3 * 512, 2)));
    assert!(!is_taken(far(i64::MAX - 7, 2)));
    assert!(is_taken(far(i64::MAX, 1)));
    assert!(!is_taken(far(2052, 50)));
    assert!(!is_taken(far(2048, 0)));
}
