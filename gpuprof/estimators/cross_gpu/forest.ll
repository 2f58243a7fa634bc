; What `forest_kernel._add_leaves` does, with the same comparison and the same order of additions.
define void @add_leaves(ptr %rows, ptr %feature, ptr %threshold, ptr %left, ptr %right, ptr %leaves, ptr %sums,
                        i64 %count, i64 %width, i64 %trees, i64 %splits, i64 %most) {
entry:
  br label %next_tree
next_tree:
  %tree = phi i64 [ 0, %entry ], [ %tree_after, %tree_done ]
  %is_tree = icmp slt i64 %tree, %trees
  br i1 %is_tree, label %first_row, label %done
first_row:
  %first_split = mul i64 %tree, %splits
  %first_leaf = mul i64 %tree, %most
  br label %next_row
next_row:
  %row = phi i64 [ 0, %first_row ], [ %row_after, %fallen ]
  %is_row = icmp slt i64 %row, %count
  br i1 %is_row, label %top, label %tree_done
top:
  %first_value = mul i64 %row, %width
  br label %walk
walk:
  %node = phi i64 [ 0, %top ], [ %child, %walk ]
  %at = add i64 %first_split, %node
  %feature_at = getelementptr i32, ptr %feature, i64 %at
  %column = load i32, ptr %feature_at
  %column_long = sext i32 %column to i64
  %value_place = add i64 %first_value, %column_long
  %value_at = getelementptr double, ptr %rows, i64 %value_place
  %value = load double, ptr %value_at
  %threshold_at = getelementptr double, ptr %threshold, i64 %at
  %limit = load double, ptr %threshold_at
  %below = fcmp ole double %value, %limit
  %left_at = getelementptr i32, ptr %left, i64 %at
  %right_at = getelementptr i32, ptr %right, i64 %at
  %left_child = load i32, ptr %left_at
  %right_child = load i32, ptr %right_at
  %child_short = select i1 %below, i32 %left_child, i32 %right_child
  %child = sext i32 %child_short to i64
  %is_split = icmp sge i64 %child, 0
  br i1 %is_split, label %walk, label %fallen
fallen:
  %leaf = sub i64 -1, %child
  %leaf_place = add i64 %first_leaf, %leaf
  %leaf_at = getelementptr double, ptr %leaves, i64 %leaf_place
  %more = load double, ptr %leaf_at
  %sum_at = getelementptr double, ptr %sums, i64 %row
  %before = load double, ptr %sum_at
  %sum = fadd double %before, %more
  store double %sum, ptr %sum_at
  %row_after = add i64 %row, 1
  br label %next_row
tree_done:
  %tree_after = add i64 %tree, 1
  br label %next_tree
done:
  ret void
}
