"""The written orders, evaluated anew in NumPy: nothing here imports the ops or the schema.

Every function takes and returns fp32 arrays; a bf16 number is an fp32 number whose lower half is
zero, so that equal bf16 bits are equal fp32 bits. NumPy rounds each operation on its own.
"""
