"""Has the parts of a plan done by other processes, on any number of machines that share a folder or write to a bucket.

work.py    what a worker gets, does and gives back; the interface of workers
driver.py  gives out the parts, sees to those that are lost or slow, and puts together what was done
on_ray.py  the workers of a Ray cluster; ray is imported nowhere else
"""
